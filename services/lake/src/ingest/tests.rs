use redeliver_core::HumanDuration;
use tokio::runtime::Runtime;

use super::*;
use crate::delta::Location;

/// Buffers of all tables, each with so many rows that have waited.
fn buffers(rows: [usize; 2]) -> (Runtime, tempfile::TempDir, Vec<Buffer>) {
    let runtime = Runtime::new().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let location = Location::parse(directory.path().to_str().unwrap()).unwrap();
    let store = Store::new(location, runtime.handle().clone()).unwrap();
    let mut buffers = open(&store).unwrap();
    for (buffer, rows) in buffers.iter_mut().zip(rows) {
        for _ in 0..rows {
            buffer.batch.row().end();
            buffer.since = Some(Instant::now());
        }
    }
    (runtime, directory, buffers)
}

#[test]
fn waiting_table_does_not_stop_others() {
    let (_runtime, _directory, buffers) = buffers([2, 1]);
    let mut lake = LakeConfig {
        flush_interval: HumanDuration::from_millis(0),
        ..LakeConfig::default()
    };
    let due = |lake: &LakeConfig, waiting: &[usize]| {
        let waiting = waiting.iter().map(|table| (*table, ())).collect();
        super::due(&buffers, lake, &waiting)
    };
    assert_eq!(due(&lake, &[]), Some(0));
    assert_eq!(due(&lake, &[0]), Some(1));
    assert_eq!(due(&lake, &[0, 1]), None);
    // Before their time, because of their size.
    lake.flush_interval = HumanDuration::from_secs(3_600);
    assert_eq!(due(&lake, &[]), None);
    lake.buffer_bytes = 1;
    assert_eq!(due(&lake, &[]), Some(0));
    assert_eq!(due(&lake, &[0]), Some(1));
    // Empty ones would be flushed for ever.
    assert_eq!(due(&lake, &[0, 1]), None);
}
