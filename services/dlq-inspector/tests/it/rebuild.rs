//! The index follows the topics: what is aborted, removed, deleted, made again; a file that is lost; the
//! ledger.

use std::collections::BTreeSet;

use redeliver_core::{Clock as _, SystemClock, Timestamp};
use redeliver_dlq_inspector::index::FILE;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::error::reason;
use redeliver_proto::v1;
use redeliver_testkit::eventually_async;
use redeliver_testkit::kafka_request::{delete_records, delete_topic};
use tonic::Code;

use crate::support::{DEADLINE, Dead, Setup, dead, ids};

fn numbered(name: &str, count: usize) -> Vec<Dead> {
    (0..count)
        .map(|number| {
            dead(
                &format!("{name}-{number}"),
                format!("{name}-{number}"),
                &[("batch", name)],
            )
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_records_never_appear() {
    let setup = Setup::new("aborted");
    let topic = setup.topic("a", 1).await;
    setup.put(&topic, 0, numbered("first", 2)).await;
    setup.put_and_abort(&topic, 0, numbered("never", 3));
    let mut inspector = setup.serve().await;
    setup.put_and_abort(&topic, 0, numbered("never", 3));
    setup.put(&topic, 0, numbered("last", 1)).await;
    inspector.until_listed("headers.batch = last", 1).await;
    assert_eq!(inspector.list("").await.len(), 3);
    let mut client = inspector.client().await;
    let id = format!("{topic}/0/2");
    let refused = client
        .get_dead_letter(v1::GetDeadLetterRequest { id })
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_index_is_built_again_and_one_that_is_found_is_gone_on_with() {
    let setup = Setup::new("rebuilt");
    let (first, second) = (setup.topic("a", 3).await, setup.topic("b", 1).await);
    for partition in 0..3 {
        setup.put(&first, partition, numbered("old", 50)).await;
    }
    let mut inspector = setup.serve().await;
    let before = inspector.list("").await;
    assert_eq!(before.len(), 150);
    let page = v1::ListDeadLettersRequest {
        page_size: 10,
        ..v1::ListDeadLettersRequest::default()
    };
    let mut client = inspector.client().await;
    let token = client
        .list_dead_letters(page.clone())
        .await
        .unwrap()
        .into_inner()
        .next_page_token;
    assert_eq!(inspector.end(), Some(0));

    // What comes while it is down is read, and what it knows is not read again.
    setup.put(&second, 0, numbered("new", 7)).await;
    let mut inspector = setup.serve().await;
    assert_eq!(inspector.said(" index="), "\"found\"");
    assert_eq!(inspector.list("").await.len(), 157);
    let metrics = inspector.admin("/metrics");
    assert!(
        metrics.contains(&format!("redeliver_dlq_indexed_total{{topic=\"{second}\"}} 7")),
        "{metrics}"
    );
    assert!(
        !metrics.contains(&format!("redeliver_dlq_indexed_total{{topic=\"{first}\"}}")),
        "{metrics}"
    );
    let mut client = inspector.client().await;
    let with_token = v1::ListDeadLettersRequest {
        page_token: token,
        ..page
    };
    assert!(client.list_dead_letters(with_token.clone()).await.is_ok());
    assert_eq!(inspector.end(), Some(0));

    for entry in std::fs::read_dir(setup.data_dir()).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let mut inspector = setup.serve().await;
    assert_eq!(inspector.said(" index="), "\"new\"");
    let mut after = inspector.list("topic != none AND headers.batch = old").await;
    // Those of one millisecond come in another order.
    let order = |letter: &v1::DeadLetter| letter.id.clone();
    let mut before = before;
    before.sort_by_key(order);
    after.sort_by_key(order);
    assert_eq!(before, after);
    let mut client = inspector.client().await;
    let refused = client.list_dead_letters(with_token).await.unwrap_err();
    assert_eq!(
        (refused.code(), reason(&refused).as_deref()),
        (Code::FailedPrecondition, Some("TOKEN_EXPIRED"))
    );
    assert_eq!(inspector.end(), Some(0));

    // A file that is no database is lost as well.
    std::fs::write(setup.data_dir().join(FILE), vec![7; 100_000]).unwrap();
    let mut inspector = setup.serve().await;
    assert_eq!(inspector.list("").await.len(), 157);
    assert!(
        inspector
            .process
            .output()
            .contains("the index cannot be used and is built again")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_deleted_is_gone_and_one_made_again_is_read_anew() {
    let setup = Setup::new("again");
    let (topic, other) = (setup.topic("a", 2).await, setup.topic("b", 1).await);
    setup.put(&topic, 0, numbered("old", 20)).await;
    setup.put(&topic, 1, numbered("old", 5)).await;
    setup.put(&other, 0, numbered("other", 3)).await;
    let mut inspector = setup.serve().await;
    assert_eq!(inspector.list("").await.len(), 28);
    delete_topic(&setup.kafka.brokers, &topic);
    inspector.until_listed("", 3).await;

    // Fewer records than before, then as many.
    setup.make_topic(&topic, 2).await;
    setup.put(&topic, 0, numbered("new", 4)).await;
    let listed = inspector.until_listed("headers.batch = new", 4).await;
    assert_eq!(listed[0].position.as_ref().unwrap().topic, &*topic);
    assert_eq!(inspector.list("").await.len(), 7);

    // At once, so that no survey sees the topic missing: only its content tells.
    delete_topic(&setup.kafka.brokers, &topic);
    setup.make_topic(&topic, 2).await;
    setup.put(&topic, 0, numbered("third", 4)).await;
    inspector.until_listed("headers.batch = third", 4).await;
    inspector.until_listed("headers.batch = new", 0).await;
    assert_eq!(inspector.list("").await.len(), 7);
    assert_eq!(inspector.end(), Some(0));

    // While nobody looks: as many records at the same offsets, and more than there were.
    delete_topic(&setup.kafka.brokers, &topic);
    setup.make_topic(&topic, 2).await;
    setup.put(&topic, 0, numbered("fourth", 9)).await;
    let mut inspector = setup.serve().await;
    assert_eq!(inspector.said(" index="), "\"found\"");
    inspector.until_listed("headers.batch = fourth", 9).await;
    assert_eq!(inspector.list("").await.len(), 12);
    let letters = inspector.list("headers.batch = fourth").await;
    let mut client = inspector.client().await;
    for letter in letters {
        let request = v1::GetDeadLetterRequest {
            id: letter.id.clone(),
        };
        let full = client.get_dead_letter(request).await.unwrap().into_inner();
        assert_eq!(full.value.unwrap(), letter.key.unwrap());
    }
    assert_eq!(inspector.end(), Some(0));

    delete_topic(&setup.kafka.brokers, &topic);
    let mut inspector = setup.serve().await;
    inspector.until_listed("", 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_retention_removes_goes_from_the_index() {
    let setup = Setup::new("retention");
    let topic = setup.topic("a", 1).await;
    setup.put(&topic, 0, numbered("old", 10)).await;
    let mut inspector = setup.serve().await;
    delete_records(&setup.kafka.brokers, &topic, 0, 6);
    let left = inspector.until_listed("", 4).await;
    let mut offsets: Vec<&str> = ids(&left)
        .iter()
        .map(|id| id.rsplit('/').next().unwrap())
        .collect();
    offsets.sort_unstable();
    assert_eq!(offsets, ["6", "7", "8", "9"]);
    assert_eq!(inspector.end(), Some(0));
    // All of it, while nobody looks.
    delete_records(&setup.kafka.brokers, &topic, 0, 10);
    let mut inspector = setup.serve().await;
    inspector.until_listed("", 0).await;
    setup.put(&topic, 0, numbered("new", 2)).await;
    let new = inspector.until_listed("", 2).await;
    let found: BTreeSet<&str> = ids(&new).into_iter().collect();
    assert!(found.contains(format!("{topic}/0/10").as_str()), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn topics_that_are_made_later_are_found() {
    let setup = Setup::new("later");
    let mut inspector = setup.serve().await;
    assert_eq!(inspector.list("").await.len(), 0);
    let topic = setup.topic("a", 1).await;
    setup.put(&topic, 0, numbered("new", 2)).await;
    inspector.until_listed("", 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_in_the_ledger_sets_the_state() {
    let setup = Setup::new("ledger");
    let topic = setup.topic("a", 1).await;
    setup.put(&topic, 0, numbered("old", 3)).await;
    let mut inspector = setup.serve().await;
    let discarded = v1::LedgerEntry {
        state: v1::DeadLetterState::Discarded.into(),
        time: Some(to_timestamp(SystemClock.now())),
        by: "ann".into(),
        note: "test data".into(),
        ..v1::LedgerEntry::default()
    };
    // Of a topic of this name that is no more: it says nothing.
    let before = v1::LedgerEntry {
        time: Some(to_timestamp(Timestamp::from_millis(1_700_000_000_000))),
        ..discarded.clone()
    };
    setup.put_ledger(&format!("{topic}/0/0"), Some(before)).await;
    let id = format!("{topic}/0/1");
    setup.put_ledger("this is no id", Some(discarded.clone())).await;
    setup.put_ledger(&id, Some(discarded.clone())).await;
    let listed = inspector.until_listed("state = DISCARDED", 1).await;
    assert_eq!(ids(&listed), [id.as_str()]);
    assert_eq!(
        (listed[0].state_by.as_str(), listed[0].state_note.as_str()),
        ("ann", "test data")
    );
    assert_eq!(listed[0].state_time, discarded.time);
    assert_eq!(inspector.list("state = OPEN").await.len(), 2);
    assert!(
        inspector
            .process
            .output()
            .contains("a record of the ledger says nothing")
    );

    // Another record is meant: nothing is said of this one.
    let other = v1::LedgerEntry {
        content_hash: vec![1; 16].into(),
        ..discarded.clone()
    };
    setup.put_ledger(&format!("{topic}/0/2"), Some(other)).await;
    let right = v1::LedgerEntry {
        content_hash: inspector.list(&format!("id = {topic}/0/0")).await[0]
            .content_hash
            .clone(),
        state: v1::DeadLetterState::Redriven.into(),
        ..discarded
    };
    setup.put_ledger(&format!("{topic}/0/0"), Some(right)).await;
    inspector.until_listed("state = REDRIVEN", 1).await;
    inspector.until_listed("state = OPEN", 1).await;

    // The ledger tells the same after a restart without an index, and can be taken back.
    assert_eq!(inspector.end(), Some(0));
    std::fs::remove_dir_all(setup.data_dir()).unwrap();
    let mut inspector = setup.serve().await;
    assert_eq!(ids(&inspector.list("state = DISCARDED").await), [id.as_str()]);
    assert_eq!(inspector.list("state = REDRIVEN").await.len(), 1);
    setup.put_ledger(&id, None).await;
    eventually_async("the state is taken back", DEADLINE, async || {
        let listed = inspector.list(&format!("id = {id}")).await;
        let letter = &listed[0];
        if letter.state() == v1::DeadLetterState::Open && letter.state_by.is_empty() {
            Ok(())
        } else {
            Err(format!("{letter:?}"))
        }
    })
    .await;
}
