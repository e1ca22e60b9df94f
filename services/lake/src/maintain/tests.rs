use std::sync::atomic::{AtomicBool, Ordering};

use delta_kernel::FileMeta;
use delta_kernel::arrow::datatypes::Int64Type;

use super::*;
use crate::appender::{Appended, Appender, Move};
use crate::batch::Batch;
use crate::delta::{DayRows, Location};
use crate::schema::DEAD_LETTERS;

const ID: &str = "redeliver/t/id/0";

struct Env {
    _runtime: Runtime,
    _directory: tempfile::TempDir,
    lake: std::path::PathBuf,
    store: Store,
}

impl Env {
    fn new() -> Self {
        let runtime = Runtime::new().unwrap();
        let directory = tempfile::tempdir().unwrap();
        // Which URLs encode.
        let lake = directory.path().join("lake 100% \u{fc}+");
        let location = Location::parse(lake.to_str().unwrap()).unwrap();
        Self {
            lake,
            store: Store::new(location, runtime.handle().clone()).unwrap(),
            _runtime: runtime,
            _directory: directory,
        }
    }

    fn appender(&self) -> Appender<DeltaTable> {
        let (table, snapshot) = self.store.open(&DEAD_LETTERS).unwrap();
        Appender::new(table, snapshot)
    }

    /// The offsets and keys in the table.
    fn rows(&self) -> Vec<(i64, Option<String>)> {
        let (table, snapshot) = self.store.open_existing(&DEAD_LETTERS).unwrap();
        let mut found = Vec::new();
        let add = |rows: RecordBatch| {
            let offsets = rows.column_by_name("kafka_offset").unwrap();
            let keys = rows.column_by_name("key").unwrap().as_string::<i32>().clone();
            let keys = keys.iter().map(|key| key.map(str::to_owned));
            found.extend(
                offsets
                    .as_primitive::<Int64Type>()
                    .values()
                    .iter()
                    .copied()
                    .zip(keys),
            );
        };
        table.read(&snapshot, None, add).unwrap();
        found.sort();
        found
    }

    fn offsets(&self) -> Vec<i64> {
        self.rows().into_iter().map(|(offset, _)| offset).collect()
    }

    fn maintain(&self, now: Timestamp, is_dry_run: bool) -> Done {
        self.maintain_until(&CancellationToken::new(), now, is_dry_run)
    }

    fn maintain_until(&self, stop: &CancellationToken, now: Timestamp, is_dry_run: bool) -> Done {
        let work = Work {
            lake: &LakeConfig::default(),
            now,
            is_dry_run,
            stop,
        };
        work.maintain(&self.store, &DEAD_LETTERS, &mut BTreeSet::new())
            .unwrap()
    }

    /// Makes all objects older.
    fn age(&self, days: u64) {
        let time = std::time::Duration::from_secs(days * 86_400);
        let mut directories = vec![self.lake.join("dead_letters")];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let file = std::fs::File::options().append(true).open(path).unwrap();
                let modified = file.metadata().unwrap().modified().unwrap();
                file.set_modified(modified - time).unwrap();
            }
        }
    }

    /// Commits an action of an earlier entry again, as another engine could change it.
    #[expect(clippy::disallowed_types, reason = "the log of a table")]
    fn commit_changed(&self, action: &str, change: impl FnOnce(&mut serde_json::Value)) {
        let log = self.lake.join("dead_letters/_delta_log");
        let entry = |version: usize| log.join(format!("{version:020}.json"));
        let versions = (0..).take_while(|version| entry(*version).exists()).count();
        let texts = (0..versions).map(|version| std::fs::read_to_string(entry(version)).unwrap());
        let texts: Vec<String> = texts.collect();
        let lines = texts.iter().flat_map(|text| text.lines());
        let mut actions = lines.map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        let mut found = actions.rfind(|found| found.get(action).is_some()).unwrap();
        change(&mut found[action]);
        std::fs::write(entry(versions), found.to_string()).unwrap();
    }

    /// How many objects there are: data files, and entries of the log.
    fn objects(&self) -> (usize, usize) {
        let count = |directory: std::path::PathBuf| std::fs::read_dir(directory).unwrap().count();
        let table = self.lake.join("dead_letters");
        let days = std::fs::read_dir(&table)
            .unwrap()
            .map(|entry| entry.unwrap().path());
        let days = days.filter(|path| !path.ends_with("_delta_log"));
        (days.map(count).sum(), count(table.join("_delta_log")))
    }
}

/// A row, with a key that depends on the offset.
fn row(offset: i64, now: Timestamp) -> DayRows {
    let mut batch = Batch::new(&DEAD_LETTERS);
    let mut row = batch.row();
    row.nulls_before("kafka_offset");
    row.long("kafka_offset", Some(offset));
    row.nulls_before("key");
    let key = format!("k{}", offset % 3);
    row.text("key", (offset % 4 > 0).then_some(&key));
    row.end();
    DayRows {
        rows: batch.take().unwrap(),
        appended_at: now,
    }
}

fn append(appender: &mut Appender<DeltaTable>, offset: i64, now: Timestamp) {
    let moved = Move {
        id: ID.to_owned(),
        from: appender.position(ID).unwrap(),
        to: offset + 1,
    };
    let appended = appender.append(Some(row(offset, now)), vec![moved]).unwrap();
    assert!(matches!(appended, Appended::Done { .. }), "{appended:?}");
    if let Some(snapshot) = appender.table().checkpoint(appender.snapshot()) {
        appender.replace_snapshot(snapshot);
    }
}

fn later(days: i64) -> Timestamp {
    Timestamp::from_millis(SystemClock.now().as_millis() + days * MILLIS_PER_DAY)
}

#[test]
fn small_files_of_a_day_are_merged() {
    let file = |day, number: i64, rows, size| LiveFile {
        meta: FileMeta::new(format!("file:///{day}/{number}").parse().unwrap(), number, size),
        rows,
        day: Some(day),
    };
    let files: Vec<LiveFile> = [
        // Of an earlier day: in the order of their times, without large ones.
        file(1, 3, 60_000, 10),
        file(1, 1, 60_000, 10),
        file(1, 2, 100_000, 10),
        file(1, 4, 10, 3 << 20),
        file(1, 5, 10, 3 << 20),
        file(1, 6, 10, 10),
        file(2, 1, 10, 10),
    ]
    .into_iter()
    .chain((0..60).map(|number| file(3, number, 10, 10)))
    .chain((0..59).map(|number| file(4, number, 10, 10)))
    .collect();
    let groups = |today| {
        let groups = groups(&files, today).into_iter();
        let groups = groups.map(|group| {
            let numbers = group.iter().map(|file| file.meta.last_modified);
            (group[0].day.unwrap(), numbers.collect::<Vec<_>>())
        });
        groups.collect::<Vec<_>>()
    };
    let first = [(1, vec![1, 3]), (1, vec![4, 5])];
    let third = (3, (0..60).collect::<Vec<_>>());
    assert_eq!(groups(4), [&first[..], std::slice::from_ref(&third)].concat());
    let fourth = (4, (0..59).collect::<Vec<_>>());
    assert_eq!(groups(5), [&first[..], &[third, fourth]].concat());
}

#[test]
fn files_stay_bounded_and_rows_stay() {
    let env = Env::new();
    let mut appender = env.appender();
    let now = SystemClock.now();
    for offset in 0..250 {
        append(&mut appender, offset, now);
    }
    assert_eq!(env.objects().0, 250);
    let dry = env.maintain(later(1), true);
    assert_eq!((dry.files, dry.merged, dry.deleted), (250, (250, 1), 0));
    assert_eq!(env.objects().0, 250);
    // Merged at once, deleted when no reader of an earlier snapshot is left.
    assert_eq!(env.maintain(later(1), false).merged, (250, 1));
    assert_eq!(env.objects().0, 251);
    assert_eq!(env.offsets(), (0..250).collect::<Vec<_>>());
    env.age(8);
    append(&mut appender, 250, now);
    let dry = env.maintain(later(1), true);
    let done = env.maintain(later(1), false);
    assert_eq!((dry.deleted, done.merged), (done.deleted, (2, 1)));
    // The log before the checkpoint of version 200, too. The two files that were merged now are needed by earlier snapshots.
    let (files, log) = env.objects();
    assert_eq!(files, 3);
    assert!(log < 70, "{log}");
    assert_eq!(env.offsets(), (0..251).collect::<Vec<_>>());
    // The positions are still known.
    let (table, snapshot) = env.store.open(&DEAD_LETTERS).unwrap();
    assert_eq!(table.position(&snapshot, ID).unwrap(), Some(251));
    append(&mut appender, 251, now);
    assert_eq!(env.maintain(later(1), false).merged, (2, 1));
    assert_eq!(env.offsets(), (0..252).collect::<Vec<_>>());
}

#[test]
fn merges_and_appends_do_not_disturb_each_other() {
    let env = Env::new();
    let mut appender = env.appender();
    let now = SystemClock.now();
    let is_complete = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for offset in 0..120 {
                append(&mut appender, offset, now);
            }
            is_complete.store(true, Ordering::Relaxed);
        });
        let merge = || {
            let mut merged = 0;
            while !is_complete.load(Ordering::Relaxed) {
                merged += env.maintain(later(1), false).merged.0;
            }
            merged
        };
        let mergers = [scope.spawn(merge), scope.spawn(merge)];
        let merged: usize = mergers.map(|merger| merger.join().unwrap()).iter().sum();
        assert!(merged > 0);
    });
    assert_eq!(env.offsets(), (0..120).collect::<Vec<_>>());
}

#[test]
fn files_that_are_gone_are_not_replaced() {
    let env = Env::new();
    let mut appender = env.appender();
    let now = SystemClock.now();
    for offset in 0..4 {
        append(&mut appender, offset, now);
    }
    let (table, snapshot) = env.store.open_existing(&DEAD_LETTERS).unwrap();
    let files = table.live(&snapshot).unwrap().files;
    let group: Vec<&LiveFile> = files.iter().collect();
    let merge =
        |group: &[&LiveFile]| merge(&table, &snapshot, group, MERGED_BYTES, &mut BTreeSet::new()).unwrap();
    assert_eq!(merge(&group[..3]), 3);
    // From the same snapshot, with files that are in it.
    assert_eq!(merge(&group[1..]), 0);
    assert_eq!(env.offsets(), [0, 1, 2, 3]);
}

#[test]
fn rows_of_a_key_are_purged() {
    let env = Env::new();
    let mut appender = env.appender();
    let now = SystemClock.now();
    for offset in 0..6 {
        append(&mut appender, offset, now);
    }
    env.maintain(later(1), false);
    for offset in 6..12 {
        append(&mut appender, offset, now);
    }
    let purge = |conditions: &[(&str, &str)], is_dry_run| {
        let conditions = conditions
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let condition = Condition(conditions.collect());
        assert!(condition.is_of(&DEAD_LETTERS));
        let (table, snapshot) = env.store.open_existing(&DEAD_LETTERS).unwrap();
        purge(&table, snapshot, &condition, is_dry_run).unwrap()
    };
    assert_eq!(purge(&[("key", "k2"), ("kafka_offset", "5")], true), 1);
    assert_eq!(purge(&[("key", "k2")], true), 3);
    assert_eq!(env.rows().len(), 12);
    assert_eq!(purge(&[("key", "k2")], false), 3);
    let left: Vec<i64> = (0..12)
        .filter(|offset| offset % 3 != 2 || offset % 4 == 0)
        .collect();
    assert_eq!(env.offsets(), left);
    assert_eq!(purge(&[("key", "k2")], false), 0);
    // A file without other rows is removed without another one.
    assert_eq!(purge(&[("kafka_offset", "7")], false), 1);
    // The files with the rows are deleted once no earlier snapshot is kept.
    env.age(8);
    env.maintain(now, false);
    let (table, snapshot) = env.store.open_existing(&DEAD_LETTERS).unwrap();
    assert_eq!(env.objects().0, table.live(&snapshot).unwrap().files.len());
    let left: Vec<i64> = left.into_iter().filter(|offset| *offset != 7).collect();
    assert_eq!(env.offsets(), left);
}

/// The rows with this key.
fn key(key: &str) -> Condition {
    Condition(vec![("key".to_owned(), key.to_owned())])
}

#[test]
fn rows_committed_during_purge_are_purged() {
    let env = Env::new();
    let mut appender = env.appender();
    let now = SystemClock.now();
    append(&mut appender, 2, now);
    let (table, snapshot) = env.store.open_existing(&DEAD_LETTERS).unwrap();
    append(&mut appender, 5, now);
    append(&mut appender, 6, now);
    assert_eq!(purge(&table, snapshot, &key("k2"), false).unwrap(), 2);
    assert_eq!(env.offsets(), [6]);
}

#[test]
fn files_of_other_engines_are_deleted() {
    let env = Env::new();
    let mut appender = env.appender();
    let now = SystemClock.now();
    append(&mut appender, 1, now);
    append(&mut appender, 2, now);
    let (table, snapshot) = env.store.open_existing(&DEAD_LETTERS).unwrap();
    let file = table.live(&snapshot).unwrap().files.remove(0).meta.location;
    assert_eq!(env.maintain(later(1), false).merged, (2, 1));
    // As if another engine had written it.
    let file = file.to_file_path().unwrap();
    std::fs::rename(&file, file.with_file_name("part-00000-c000.snappy.parquet")).unwrap();
    env.age(8);
    env.maintain(now, false);
    assert_eq!(env.objects().0, 1);
    assert_eq!(env.offsets(), [1, 2]);
}

#[test]
fn large_file_does_not_block_others() {
    let env = Env::new();
    let mut appender = env.appender();
    let now = SystemClock.now();
    for offset in [1, 2, 3] {
        append(&mut appender, offset, now);
    }
    let (table, snapshot) = env.store.open_existing(&DEAD_LETTERS).unwrap();
    let files = table.live(&snapshot).unwrap().files;
    let group: Vec<&LiveFile> = files.iter().collect();
    let rows = table.rows(&snapshot, group[0]).unwrap();
    let bytes: usize = rows.iter().map(RecordBatch::get_array_memory_size).sum();
    // Each is as large as a merge may be.
    let mut large = BTreeSet::new();
    assert_eq!(merge(&table, &snapshot, &group, bytes, &mut large).unwrap(), 0);
    assert_eq!(large.len(), 3);
    // One more is merged with the others.
    append(&mut appender, 6, now);
    let snapshot = table.refresh(&snapshot).unwrap();
    let files = table.live(&snapshot).unwrap().files;
    let (known, new): (Vec<_>, Vec<_>) = files.iter().partition(|file| large.contains(&file.meta.location));
    assert_eq!((known.len(), new.len()), (3, 1));
    let work = Work {
        lake: &LakeConfig::default(),
        now: later(1),
        is_dry_run: false,
        stop: &CancellationToken::new(),
    };
    large.remove(&known[0].meta.location);
    let done = work.maintain(&env.store, &DEAD_LETTERS, &mut large).unwrap();
    assert_eq!((done.files, done.merged), (4, (2, 1)));
    assert_eq!(env.offsets(), [1, 2, 3, 6]);
}

#[test]
fn shutdown_ends_maintenance() {
    let env = Env::new();
    let mut appender = env.appender();
    let now = SystemClock.now();
    for offset in [1, 2, 3] {
        append(&mut appender, offset, now);
    }
    let stop = CancellationToken::new();
    stop.cancel();
    assert_eq!(env.maintain_until(&stop, later(1), false).merged, (0, 0));
}

#[test]
fn dry_run_writes_nothing() {
    let env = Env::new();
    let mut appender = env.appender();
    for offset in [1, 2, 3] {
        append(&mut appender, offset, SystemClock.now());
    }
    let before = env.objects();
    assert_eq!(env.maintain(later(1), true).merged, (3, 1));
    assert_eq!(env.objects(), before);
}

#[test]
fn failing_table_does_not_stop_others() {
    let env = Env::new();
    drop(env.appender());
    let found = std::cell::RefCell::new(Vec::new());
    let code = of_each(TABLES, |schema| {
        env.store.open_existing(schema)?;
        found.borrow_mut().push(schema.table);
        Ok(())
    });
    assert_ne!(code, ExitCode::SUCCESS);
    assert_eq!(found.into_inner(), [DEAD_LETTERS.table]);
}

#[test]
fn idle_writer_appends_to_newest_version() {
    let env = Env::new();
    let mut idle = env.appender();
    let mut other = env.appender();
    let now = SystemClock.now();
    for offset in 0..150 {
        append(&mut other, offset, now);
    }
    // The entry after the one that the idle writer knows is deleted.
    env.age(8);
    append(&mut other, 150, now);
    env.maintain(later(1), false);
    let moved = Move {
        id: "redeliver/t/id/1".to_owned(),
        from: None,
        to: 1_000,
    };
    let appended = idle.append(Some(row(999, now)), vec![moved]).unwrap();
    assert_eq!(appended, Appended::Done { conflicts: 0 });
    assert_eq!(env.offsets().last(), Some(&999));
}

#[test]
fn properties_that_lose_rows_are_refused() {
    for (property, value) in [
        ("delta.setTransactionRetentionDuration", "interval 1 days"),
        ("delta.columnMapping.mode", "name"),
    ] {
        let env = Env::new();
        let mut appender = env.appender();
        append(&mut appender, 1, SystemClock.now());
        env.commit_changed("metaData", |metadata| {
            metadata["configuration"][property] = value.into();
        });
        let table = appender.table();
        let snapshot = table.refresh(appender.snapshot()).unwrap();
        let refused = table.position(&snapshot, ID).unwrap_err();
        assert!(matches!(refused, TableError::Unsuitable { .. }), "{refused:?}");
    }
}

#[test]
fn deleted_rows_never_come_back() {
    let env = Env::new();
    let mut appender = env.appender();
    append(&mut appender, 1, SystemClock.now());
    env.commit_changed("add", |add| {
        add["deletionVector"] = serde_json::json!({
            "storageType": "i",
            "pathOrInlineDv": "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L",
            "sizeInBytes": 40,
            "cardinality": 6,
        });
    });
    let (table, snapshot) = env.store.open_existing(&DEAD_LETTERS).unwrap();
    let refused = table.live(&snapshot).err().unwrap();
    assert!(refused.to_string().contains("has deletion vectors"), "{refused}");
}

#[test]
fn live_file_without_day_is_kept() {
    let env = Env::new();
    let mut appender = env.appender();
    let now = SystemClock.now();
    append(&mut appender, 1, now);
    let (table, snapshot) = env.store.open_existing(&DEAD_LETTERS).unwrap();
    let file = table.live(&snapshot).unwrap().files.remove(0).meta.location;
    let directory = env.lake.join("dead_letters/day=__HIVE_DEFAULT_PARTITION__");
    std::fs::create_dir(&directory).unwrap();
    std::fs::copy(file.to_file_path().unwrap(), directory.join("x.parquet")).unwrap();
    env.commit_changed("add", |add| {
        add["path"] = "day=__HIVE_DEFAULT_PARTITION__/x.parquet".into();
        add["partitionValues"]["day"] = serde_json::json!(null);
    });
    env.age(8);
    assert_eq!(env.maintain(now, false).deleted, 0);
    assert_eq!(env.offsets(), [1, 1]);
    let (table, snapshot) = env.store.open_existing(&DEAD_LETTERS).unwrap();
    let condition = Condition(vec![("kafka_offset".to_owned(), "1".to_owned())]);
    assert_eq!(purge(&table, snapshot, &condition, false).unwrap(), 2);
}

#[test]
fn missed_checkpoint_is_written() {
    let env = Env::new();
    let mut appender = env.appender();
    let now = SystemClock.now();
    for offset in 0..99 {
        append(&mut appender, offset, now);
    }
    // The merge takes the version after which the writer would write one.
    assert_eq!(env.maintain(later(1), false).merged, (99, 1));
    let checkpoint = "dead_letters/_delta_log/00000000000000000100.checkpoint.parquet";
    assert!(env.lake.join(checkpoint).exists());
}
