//! The file: opened, replaced, rebuilt, on a full disk, after a crash.

use super::*;

#[test]
fn unusable_index_is_replaced() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    let path = fixture.directory.path().join(FILE);
    assert!(matches!(
        Index::open(fixture.directory.path(), &[]),
        Err(IndexError::InUse { .. })
    ));
    let reopen = |fixture: Fixture| {
        let Fixture {
            directory,
            index,
            json_fields,
        } = fixture;
        drop(index);
        let index = Index::open(directory.path(), &[]).unwrap();
        Fixture {
            directory,
            index,
            json_fields,
        }
    };
    let fixture = reopen(fixture);
    assert!(!fixture.index.is_new);
    assert_eq!(fixture.matching(""), [1]);

    rusqlite::Connection::open(&path)
        .unwrap()
        .pragma_update(None, "user_version", 99)
        .unwrap();
    let mut fixture = reopen(fixture);
    assert!(fixture.index.is_new);
    assert_eq!(fixture.matching(""), [0_i64; 0]);
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);

    let Fixture { directory, index, .. } = fixture;
    drop(index);
    std::fs::write(&path, b"this is not a database").unwrap();
    let index = Index::open(directory.path(), &[]).unwrap();
    assert!(index.is_new);
    drop(index);
    std::fs::remove_file(&path).unwrap();
    assert!(Index::open(directory.path(), &[]).unwrap().is_new);
}

#[test]
fn damaged_positions_replace_the_index() {
    for table in ["positions", "topic_ids"] {
        let mut fixture = Fixture::new();
        fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
        let Fixture { directory, index, .. } = fixture;
        drop(index);
        damage(&directory.path().join(FILE), table);
        let index = Index::open(directory.path(), &[]).unwrap();
        assert!(index.is_new, "{table}");
        assert!(index.pool.read_blocking(read_positions).is_ok());
    }
}

#[test]
fn failed_shared_memory_means_full_disk() {
    let failed = |code| IndexError::Database {
        step: "opening the index",
        source: rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None),
    };
    let full = [rusqlite::ffi::SQLITE_FULL, rusqlite::ffi::SQLITE_IOERR_SHMSIZE].map(failed);
    assert!(
        full.iter()
            .all(|error| error.is_disk_full() && error.can_be_opened_later())
    );
    let other = failed(rusqlite::ffi::SQLITE_IOERR_READ);
    assert!(!other.is_disk_full() && other.can_be_opened_later());
}

#[test]
fn failed_creation_leaves_no_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(FILE);
    // The database can be opened, but not its write-ahead log.
    std::fs::create_dir(with_suffix(&path, "-wal")).unwrap();
    let error = schema::create(&path).unwrap_err();
    assert!(error.is_temporary(), "{error:?}");
    assert!(!path.exists());
}

#[test]
fn log_shrinks_after_a_reader() {
    let mut fixture = Fixture::new();
    let reader = rusqlite::Connection::open(fixture.directory.path().join(FILE)).unwrap();
    reader
        .execute_batch("BEGIN; SELECT count(*) FROM letters")
        .unwrap();
    let large = "x".repeat(60_000);
    let put = |fixture: &mut Fixture, from: i64, count: i64| {
        for start in (from..from + count).step_by(100) {
            fixture.put(
                (start..start + 100)
                    .map(|offset| letter("t-dlq", 0, offset, &[("large", &large)]))
                    .collect(),
            );
        }
    };
    put(&mut fixture, 0, 1_500);
    let log = fixture.directory.path().join(format!("{FILE}-wal"));
    let size = || std::fs::metadata(&log).unwrap().len();
    assert!(size() > 70 << 20, "{}", size());
    drop(reader);
    put(&mut fixture, 2_000, 500);
    assert!(size() <= 65 << 20, "{}", size());
}

#[test]
fn other_fields_build_another_index() {
    let mut fixture = Fixture::new();
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    let Fixture { directory, index, .. } = fixture;
    drop(index);
    let previous = directory.path().join("dlq-index.db");
    std::fs::write(&previous, b"of a previous version").unwrap();
    let new = Index::open(directory.path(), &JSON_FIELDS).unwrap();
    assert!(new.is_new);
    let old = directory.path().join(FILE);
    assert!(old.exists() && previous.exists());
    // Without the fields again, before the new index is complete: nothing is read again.
    drop(new);
    assert!(!Index::open(directory.path(), &[]).unwrap().is_new);
    let new = Index::open(directory.path(), &JSON_FIELDS).unwrap();
    assert!(!new.is_new);
    new.writer.remove_outdated();
    assert!(!old.exists() && !previous.exists());
    assert!(directory.path().join("dlq-index.lock").exists());
    drop(new);
    assert!(!Index::open(directory.path(), &JSON_FIELDS).unwrap().is_new);
}

#[test]
fn failure_repeats_only_remaining_changes() {
    let mut fixture = Fixture::new();
    let now = Timestamp::from_millis(0);
    fixture.put(vec![letter("t-dlq", 0, 1, &[])]);
    let many = (0..500).map(|offset| letter("t-dlq", 0, offset, &[]));
    let changes = [
        Change::Letters(vec![letter("other-dlq", 0, 1, &[])]),
        forget("t-dlq"),
        Change::Letters(many.collect()),
    ];
    let writer = &mut fixture.index.writer;
    assert_eq!(writer.write(&changes, now).unwrap(), 2);
    while writer.remove_slice().unwrap() {}
    writer.limit_size_to_pages(1);
    let error = writer.write(&changes[2..], now).unwrap_err();
    assert!(error.is_temporary() && !error.is_damage(), "{error:?}");
    assert_eq!(fixture.matching(""), [1]);
    let writer = &mut fixture.index.writer;
    writer.limit_size_to_pages(1_000_000);
    assert_eq!(writer.write(&changes[2..], now).unwrap(), 1);
    assert_eq!(fixture.matching("topic = t-dlq").len(), 500);
    assert_eq!(fixture.matching("topic = other-dlq"), [1]);
}
