use redeliver_testkit::record_at;

use super::*;

const DEAD: usize = 2;
const OUTCOMES: usize = 1;

fn name() -> Arc<str> {
    "t-dlq".into()
}

/// Feeds of a topic with one partition, which is in two tables with these positions, and is followed.
fn feeds(dead: Option<i64>, outcomes: Option<i64>) -> (Feeds, Option<Start>) {
    let (mut feeds, start) = started(dead, outcomes);
    feeds.followed(start.as_slice());
    (feeds, start)
}

/// As [`feeds`], but the partition is not followed yet.
fn started(dead: Option<i64>, outcomes: Option<i64>) -> (Feeds, Option<Start>) {
    let mut feeds = Feeds::default();
    let source = Source {
        tables: vec![DEAD, OUTCOMES],
        origin: Origin {
            topic_id: "id".to_owned(),
            tier: None,
            is_dead: true,
            expects_result: false,
            masked_as: "t-dlq".to_owned(),
        },
    };
    feeds.add_topic(&name(), Topic::new(Some(TopicId::from_bits(1)), source));
    let position = |table, id: &str| -> Result<_, ()> {
        assert_eq!(id, "redeliver/t-dlq/id/0");
        Ok(if table == DEAD { dead } else { outcomes })
    };
    let start = feeds.start(&name(), 0, None, position).unwrap();
    (feeds, start)
}

fn read(feeds: &mut Feeds, offset: i64) -> Vec<usize> {
    let mut tables = Vec::new();
    feeds.read(&record_at("t-dlq", 0, offset), |table, _| tables.push(table));
    tables
}

#[test]
fn reading_starts_at_the_first_gap() {
    for (dead, outcomes, from) in [
        (None, None, None),
        (Some(5), None, None),
        (Some(5), Some(3), Some(3)),
        (Some(5), Some(7), Some(5)),
    ] {
        let (_, start) = feeds(dead, outcomes);
        assert_eq!(start.unwrap().from, from, "{dead:?} {outcomes:?}");
    }
}

#[test]
fn each_table_gets_what_it_lacks() {
    let (mut feeds, _) = feeds(Some(5), Some(3));
    assert_eq!(read(&mut feeds, 3), [OUTCOMES]);
    assert_eq!(read(&mut feeds, 4), [OUTCOMES]);
    assert_eq!(read(&mut feeds, 5), [DEAD, OUTCOMES]);
    let (moves, topics) = feeds.moves(OUTCOMES);
    assert_eq!((moves[0].from, moves[0].to), (Some(3), 6));
    assert_eq!(topics, [name()]);
    feeds.committed(OUTCOMES);
    assert!(feeds.moves(OUTCOMES).0.is_empty());
    assert_eq!(feeds.moves(DEAD).0[0].from, Some(5));
}

#[test]
fn markers_move_positions() {
    let (mut feeds, _) = feeds(Some(5), Some(5));
    let mut moved = Vec::new();
    feeds.ended("t-dlq", 0, 5, |table| moved.push(table));
    assert!(moved.is_empty());
    feeds.ended("t-dlq", 0, 6, |table| moved.push(table));
    assert_eq!(moved, [DEAD, OUTCOMES]);
    assert_eq!(feeds.moves(DEAD).0[0].to, 6);
}

#[test]
fn dropped_rows_are_read_again() {
    let (mut feeds, _) = feeds(Some(5), Some(5));
    read(&mut feeds, 5);
    let starts = feeds.reload(DEAD, |_| -> Result<_, ()> { Ok(Some(4)) }).unwrap();
    assert_eq!(starts[0].from, Some(4));
    // What arrives until then is from another offset.
    assert!(read(&mut feeds, 6).is_empty());
    feeds.ended("t-dlq", 0, 7, |_| panic!("moved"));
    feeds.followed(&starts);
    assert_eq!(read(&mut feeds, 4), [DEAD]);
    assert_eq!(read(&mut feeds, 5), [DEAD]);
}

#[test]
fn deleted_records_are_lost_for_tables_before() {
    let (mut feeds, _) = feeds(Some(5), Some(9));
    let lost = feeds.before(&name(), 0, 8);
    assert_eq!(lost.len(), 1);
    assert_eq!((lost[0].table, lost[0].from, lost[0].until), (DEAD, 5, 8));
    let start = feeds.skip_to(&name(), 0, Extent { low: 8, end: 20 });
    feeds.followed(start.as_slice());
    assert_eq!(start.unwrap().from, Some(8));
    assert_eq!(read(&mut feeds, 8), [DEAD]);
    // A table that has never had a record of the partition has lost none.
    let (mut feeds, _) = self::feeds(None, None);
    assert!(feeds.before(&name(), 0, 8).is_empty());
}

#[test]
fn truncated_partition_waits_for_its_end() {
    let (mut feeds, _) = feeds(Some(5), Some(5));
    let extent = |end| Some(Extent { low: 0, end });
    let nothing = |_, _: &str| -> Result<_, ()> { Ok(None) };
    // Until a survey has found out that it was truncated, it is started again.
    feeds.stop("t-dlq", 0);
    assert!(feeds.start(&name(), 0, extent(4), nothing).unwrap().is_some());
    assert!(feeds.start(&name(), 0, None, nothing).unwrap().is_some());
    let lost = feeds.truncated(&name(), 0, 4);
    assert_eq!(feeds.skip_to(&name(), 0, extent(4).unwrap()), None);
    assert_eq!(
        (lost[0].from, lost[0].until, &*lost[0].id),
        (4, 5, "redeliver/t-dlq/id/0/truncated")
    );
    assert_eq!(lost.len(), 2);
    assert_eq!(feeds.start(&name(), 0, extent(4), nothing), Ok(None));
    assert_eq!(feeds.start(&name(), 0, None, nothing), Ok(None));
    let start = feeds.start(&name(), 0, extent(5), nothing).unwrap();
    assert_eq!(start.as_ref().unwrap().from, Some(5));
    feeds.followed(start.as_slice());
    assert_eq!(feeds.start(&name(), 0, extent(6), nothing), Ok(None));
    // It has got other records since.
    let lost = feeds.truncated(&name(), 0, 20);
    assert_eq!((lost[0].from, lost[0].until), (4, 5));
}

#[test]
fn new_table_hides_no_gap_of_another() {
    let (mut feeds, start) = started(Some(5), None);
    assert_eq!(start.unwrap().from, None);
    assert!(feeds.has_position("t-dlq", 0));
    // Nothing was read yet that could be truncated.
    assert!(feeds.truncated(&name(), 0, 3).is_empty());
    let lost = feeds.before(&name(), 0, 8);
    assert_eq!(
        (lost.len(), lost[0].table, lost[0].from, lost[0].until),
        (1, DEAD, 5, 8)
    );
    let start = feeds.skip_to(&name(), 0, Extent { low: 8, end: 20 });
    feeds.followed(start.as_slice());
    assert_eq!(read(&mut feeds, 8), [DEAD, OUTCOMES]);
}

#[test]
fn unfollowed_partition_is_started_again() {
    let (mut feeds, start) = started(Some(5), Some(5));
    let extent = Some(Extent { low: 0, end: 9 });
    let position = |_, id: &str| id.ends_with("/0").then_some(None).ok_or(());
    // The positions of the next partition cannot be read, so that none is followed.
    assert_eq!(feeds.start(&name(), 1, extent, position), Err(()));
    assert_eq!(feeds.start(&name(), 0, extent, position), Ok(start.clone()));
    feeds.followed(start.as_slice());
    assert_eq!(feeds.start(&name(), 0, extent, position), Ok(None));
}

/// What a survey finds of the topic, with a partition of this end.
fn found(end: i64) -> [SurveyedTopic; 1] {
    [SurveyedTopic {
        name: name(),
        id: Some(TopicId::from_bits(1)),
        partitions: vec![
            Some(Extent { low: 0, end }),
            Some(Extent {
                low: 0,
                end: i64::MAX,
            }),
        ],
        refusal: None,
    }]
}

#[test]
fn one_partition_without_progress_stalls() {
    let (mut feeds, _) = feeds(Some(5), Some(5));
    let none = |_, _: &str| -> Result<_, ()> { Ok(None) };
    let other = feeds.start(&name(), 1, None, none).unwrap();
    feeds.followed(other.as_slice());
    let mut offset = 0;
    let mut survey = |feeds: &mut Feeds, end, had_turn| {
        // The other partition goes on.
        feeds.read(&record_at("t-dlq", 1, offset), |_, _| {});
        offset += 1;
        feeds.is_stalled(&found(end), had_turn, 3)
    };
    // It is read to its end.
    assert!((0..5).all(|_| !survey(&mut feeds, 5, true)));
    // A partition that did not have its turn is not idle.
    assert!((0..5).all(|_| !survey(&mut feeds, 9, false)));
    assert!(!survey(&mut feeds, 9, true));
    assert!(!survey(&mut feeds, 9, true));
    read(&mut feeds, 5);
    let stalls: Vec<bool> = (0..8).map(|_| survey(&mut feeds, 9, true)).collect();
    // The first survey sees progress, and after a stall, counting begins again.
    assert_eq!(stalls, [false, false, false, true, false, false, true, false]);
}

#[test]
fn refused_partition_is_no_stall() {
    let (mut feeds, _) = feeds(Some(5), Some(5));
    assert_eq!(feeds.refusal(), None);
    let none = |_, _: &str| -> Result<_, ()> { Ok(None) };
    for _ in 0..9 {
        let refusal = "denied".to_owned();
        feeds.refused("t-dlq", 0, refusal);
        assert!(!feeds.is_stalled(&found(9), true, 3));
        let start = feeds.start(&name(), 0, found(9)[0].partitions[0], none).unwrap();
        feeds.followed(start.as_slice());
        assert_eq!(feeds.refusal().as_deref(), Some("t-dlq/0: denied"));
    }
    feeds.ended("t-dlq", 0, 5, |_| {});
    assert_eq!(feeds.refusal(), None);
}

#[test]
fn refused_topic_is_not_missing() {
    let (mut feeds, _) = feeds(Some(5), Some(5));
    let refused = [SurveyedTopic {
        partitions: Vec::new(),
        id: None,
        refusal: Some("denied".to_owned()),
        ..found(5)[0].clone()
    }];
    let absent = |feeds: &mut Feeds, found: &[SurveyedTopic]| feeds.absent(found, 3);
    for accident in [&found(5), &refused] {
        assert!(absent(&mut feeds, &[]).is_empty());
        assert!(absent(&mut feeds, &[]).is_empty());
        assert!(absent(&mut feeds, accident).is_empty());
    }
    assert!(absent(&mut feeds, &refused).is_empty());
    for _ in 0..9 {
        assert_eq!(absent(&mut feeds, &refused), [(name(), Absence::Refused)]);
    }
    assert!(absent(&mut feeds, &[]).is_empty());
    assert!(absent(&mut feeds, &[]).is_empty());
    assert_eq!(absent(&mut feeds, &[]), [(name(), Absence::Missing)]);
}

#[test]
fn suspended_topic_holds_nothing_up() {
    let (mut feeds, _) = feeds(Some(5), Some(7));
    read(&mut feeds, 5);
    assert_eq!(feeds.suspend("t-dlq"), [DEAD]);
    let starts = feeds.reload(DEAD, |_| -> Result<_, ()> { Ok(Some(5)) });
    assert_eq!(starts, Ok(Vec::new()));
    assert!(feeds.suspend("t-dlq").is_empty());
    assert!(feeds.moves(DEAD).1.is_empty());
    let none = |_, _: &str| -> Result<_, ()> { Ok(None) };
    let start = feeds.start(&name(), 0, found(9)[0].partitions[0], none).unwrap();
    assert_eq!(start.unwrap().from, Some(5));
}

#[test]
fn gap_begins_at_first_record_read() {
    let (mut feeds, _) = feeds(None, Some(3));
    read(&mut feeds, 1_000);
    read(&mut feeds, 1_001);
    let lost = feeds.uncommitted(&name());
    let ranges: Vec<_> = lost
        .iter()
        .map(|lost| (lost.table, lost.from, lost.until))
        .collect();
    assert_eq!(ranges, [(DEAD, 1_000, 1_002), (OUTCOMES, 3, 1_002)]);
}

#[test]
fn ids_distinguish_topics() {
    assert_eq!(text_of(TopicId::from_bits(1)), "AAAAAAAAAAAAAAAAAAAAAQ");
    let (feeds, _) = feeds(None, None);
    let known = feeds.topic("t-dlq").unwrap();
    assert!(!known.is_other(None));
    assert!(!known.is_other(Some(TopicId::from_bits(1))));
    assert!(known.is_other(Some(TopicId::from_bits(2))));
}
