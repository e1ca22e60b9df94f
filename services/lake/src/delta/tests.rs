use super::*;
use crate::appender::{Appended, Appender};
use crate::batch::Batch;
use crate::schema::GAPS;

fn rows(offsets: std::ops::Range<i64>) -> DayRows {
    let mut batch = Batch::new(&GAPS);
    for offset in offsets {
        let mut row = batch.row();
        row.nulls_before("kafka_offset");
        row.long("kafka_offset", Some(offset));
        row.end();
    }
    DayRows {
        rows: batch.take().unwrap(),
        appended_at: Timestamp::from_millis(1_800_000_000_000),
    }
}

fn moved(from: Option<i64>, to: i64) -> Vec<Move> {
    let id = "redeliver/t/id/0".to_owned();
    vec![Move { id, from, to }]
}

/// A runtime and a store in a directory.
fn store() -> (tokio::runtime::Runtime, tempfile::TempDir, Store) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let location = Location::parse(directory.path().to_str().unwrap()).unwrap();
    let store = Store::new(location, runtime.handle().clone()).unwrap();
    (runtime, directory, store)
}

fn count(store: &Store) -> usize {
    let (table, snapshot) = store.open_existing(&GAPS).unwrap();
    let mut count = 0;
    table
        .read(&snapshot, None, |rows| count += rows.num_rows())
        .unwrap();
    count
}

#[test]
fn a_path_and_a_url_are_locations() {
    for (text, expected) in [
        ("/data/lake", "file:///data/lake/"),
        ("s3://bucket/lake", "s3://bucket/lake/"),
    ] {
        assert_eq!(Location::parse(text).unwrap().0.as_str(), expected);
    }
    assert!(Location::parse("lake").is_err());
}

#[test]
fn positions_follow_rows() {
    let (_runtime, _directory, store) = store();
    store.probe().unwrap();
    let (table, snapshot) = store.open(&GAPS).unwrap();
    let mut appender = Appender::new(table, snapshot);
    let mut append = |rows, from, to| {
        let appended = appender.append(rows, moved(from, to)).unwrap();
        assert_eq!(appended, Appended::Done { conflicts: 0 });
        if let Some(snapshot) = appender.table().checkpoint(appender.snapshot()) {
            appender.replace_snapshot(snapshot);
        }
    };
    append(Some(rows(0..3)), None, 3);
    append(None, Some(3), 4);
    // There is a checkpoint among them.
    for offset in 4..110 {
        append(Some(rows(offset..offset + 1)), Some(offset), offset + 1);
    }
    let (table, snapshot) = store.open(&GAPS).unwrap();
    assert_eq!(table.position(&snapshot, "redeliver/t/id/0").unwrap(), Some(110));
    assert_eq!(table.position(&snapshot, "redeliver/t/id/1").unwrap(), None);
    assert_eq!(count(&store), 109);
}

#[test]
fn second_writer_sees_what_first_has_written() {
    let (_runtime, _directory, store) = store();
    let mut writers = [(), ()].map(|()| {
        let (table, snapshot) = store.open(&GAPS).unwrap();
        Appender::new(table, snapshot)
    });
    let other = vec![Move {
        id: "redeliver/t/id/1".to_owned(),
        from: None,
        to: 2,
    }];
    assert_eq!(
        writers[0].append(Some(rows(0..3)), moved(None, 3)).unwrap(),
        Appended::Done { conflicts: 0 }
    );
    // Another partition.
    assert_eq!(
        writers[1].append(Some(rows(0..2)), other).unwrap(),
        Appended::Done { conflicts: 0 }
    );
    assert_eq!(
        writers[1].append(Some(rows(0..3)), moved(None, 3)).unwrap(),
        Appended::Done { conflicts: 0 }
    );
    assert_eq!(
        writers[1].append(Some(rows(0..2)), moved(None, 2)).unwrap(),
        Appended::Overtaken
    );
    assert_eq!(count(&store), 5);
}

#[test]
fn table_gets_new_columns() {
    let less: &'static Schema = Box::leak(Box::new(Schema {
        table: "gaps",
        columns: &GAPS.columns[..5],
    }));
    let (_runtime, _directory, store) = store();
    store.open(less).unwrap();
    let (_, snapshot) = store.open(&GAPS).unwrap();
    assert_eq!(snapshot.schema().num_fields(), GAPS.columns.len() + 1);
}
