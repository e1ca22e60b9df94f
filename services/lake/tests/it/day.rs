//! A day of operation, with shorter intervals.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::support::{LakeEnv, objects};

const ROWS: &str = "redeliver_lake_rows_total";
const HOUR: Duration = Duration::from_secs(3_600);
/// With the default settings, a commit each minute.
const COMMITS_PER_HOUR: usize = 60;
const HOURS: usize = 24;

/// How many objects of each kind a table has.
fn count(table: &Path) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for object in objects(table) {
        let name = object.to_string_lossy();
        let kind = match &*name {
            name if !name.contains("_delta_log") => "files",
            name if name.ends_with(".checkpoint.parquet") => "checkpoints",
            _ => "entries",
        };
        *counts.entry(kind).or_default() += 1;
    }
    counts
}

/// After each hour of commits, all objects become an hour older, and tables are maintained, while the service runs.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn objects_of_a_day_stay_bounded() {
    let mut env = LakeEnv::new("lake-day");
    env.base.set("lake.keep_replaced", "2h");
    env.create_topics().await;
    let mut lake = env.spawn("a");
    lake.until_ready();
    let [_, _, tier] = env.topics();
    let table = env.lake().join("attempts");
    let mut hours = Vec::new();
    for _ in 0..HOURS {
        for _ in 0..COMMITS_PER_HOUR {
            let before = lake.metric(ROWS);
            env.put(&tier, 2).await;
            lake.until_metric(ROWS, |now| now >= before + 2);
        }
        env.age(HOUR);
        env.maintain("attempts");
        hours.push(count(&table));
    }
    println!("{hours:?}");
    let commits = lake.metric("redeliver_lake_commits_total");
    assert!(commits >= (HOURS * COMMITS_PER_HOUR) as u64, "{commits}");
    for (hour, counts) in hours.iter().enumerate() {
        // Replaced files stay for two hours, and any file for an hour until it may be committed no more.
        for (kind, hours_kept) in [("files", 4), ("entries", 6)] {
            let limit = COMMITS_PER_HOUR * hours_kept;
            assert!(counts[kind] <= limit, "hour {hour}: {counts:?}");
        }
        assert!(
            counts.get("checkpoints").is_none_or(|count| *count <= 4),
            "hour {hour}: {counts:?}"
        );
    }
    env.until_complete();
    let checked = env.base.run("redeliver-lake", &["check"]);
    assert_eq!(checked.code, Some(0), "{checked:?}");
}
