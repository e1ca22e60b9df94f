//! A load of records that lasts as long as the chaos, so that processes are killed while they work.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use redeliver_testkit::{ensure, eventually};

use crate::support::{DEADLINE, Draft, Pipe, Sent, Watch, record};

/// The maximum number of records of a test, which none should reach.
const MAX_RECORDS: usize = 40_000;
/// The time between two batches.
const INTERVAL: Duration = Duration::from_millis(50);

/// The load as the chaos sees it.
pub(crate) struct Load {
    ends: RefCell<Watch>,
}

impl Load {
    /// Waits until this many more records have ended, which means that the services are working.
    #[track_caller]
    pub(crate) fn until_ended(&self, more: usize) {
        let mut ends = self.ends.borrow_mut();
        let before = ends.look().len();
        eventually("records end", DEADLINE, || {
            let ended = ends.look().len() - before;
            ensure(ended >= more, format!("{ended} of {more} more, after {before}"))
        });
    }
}

/// Produces at this rate from before `chaos` starts until it is over, and returns the produced records.
pub(crate) fn under_load(pipe: &Pipe, per_second: u32, chaos: impl FnOnce(&Load)) -> Vec<Sent> {
    under_load_of(pipe, per_second, record, chaos)
}

/// The same with other records, which are numbered.
pub(crate) fn under_load_of(
    pipe: &Pipe,
    per_second: u32,
    record: impl FnMut(usize) -> Draft + Send,
    chaos: impl FnOnce(&Load),
) -> Vec<Sent> {
    let load = Load {
        ends: RefCell::new(pipe.watch()),
    };
    let records = (0..MAX_RECORDS).map(record);
    let produce = |is_over: &AtomicBool| produce_until(is_over, pipe, per_second, records);
    let sent = redeliver_testkit::under_load(produce, || {
        load.until_ended(1);
        chaos(&load);
    });
    assert!(sent.len() < MAX_RECORDS, "the load ended before the chaos did");
    sent
}

fn produce_until(
    is_over: &AtomicBool,
    pipe: &Pipe,
    per_second: u32,
    mut records: impl ExactSizeIterator<Item = Draft>,
) -> Vec<Sent> {
    let mut sent = Vec::new();
    let began = Instant::now();
    while !is_over.load(Ordering::SeqCst) && records.len() > 0 {
        // After an interruption, such as a broker that is down, the missed records are not sent in a burst.
        let count = usize::try_from(u128::from(per_second) * INTERVAL.as_millis() / 1000).unwrap();
        let batch = records.by_ref().take(count.max(1)).collect();
        sent.extend(pipe.produce(batch));
        thread::sleep(INTERVAL);
    }
    println!("{} records in {:.1} s", sent.len(), began.elapsed().as_secs_f64());
    sent
}
