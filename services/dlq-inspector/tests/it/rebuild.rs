//! The index follows the topics: aborted transactions, retention, deleted and recreated topics, a lost index file, the ledger.

use std::collections::BTreeSet;
use std::time::Duration;

use redeliver_core::{Clock as _, SystemClock};
use redeliver_dlq_inspector::index::FILE;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::error::reason;
use redeliver_proto::v1;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use redeliver_testkit::eventually_async;
use redeliver_testkit::kafka_request::{delete_records, delete_topic};
use tonic::Code;

use crate::support::{DEADLINE, Dead, InspectorEnv, dead, ids};

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
async fn records_of_aborted_transactions_are_not_listed() {
    let env = InspectorEnv::new("aborted");
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, numbered("first", 2)).await;
    env.put_and_abort(&topic, 0, numbered("never", 3));
    let mut inspector = env.start().await;
    env.put_and_abort(&topic, 0, numbered("never", 3));
    env.put(&topic, 0, numbered("last", 1)).await;
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
async fn a_partition_that_ends_with_aborted_records_is_read_once() {
    let env = InspectorEnv::new("aborted-end");
    let topic = env.create_topic("a", 2).await;
    env.put(&topic, 0, numbered("first", 2)).await;
    for partition in 0..2 {
        env.put_and_abort(&topic, partition, numbered("never", 3));
    }
    let mut inspector = env.start().await;
    inspector.until_listed("", 2).await;
    env.put_and_abort(&topic, 0, numbered("never", 3));
    // A consumer that has not answered for four surveys is recreated, and there is a survey every two seconds.
    inspector.until_surveyed_after(Duration::from_secs(14)).await;
    assert_eq!(inspector.list("").await.len(), 2);
    let output = inspector.process.output();
    assert!(!output.contains("consumer stalled"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_existing_index_is_continued_and_a_lost_one_is_rebuilt() {
    let env = InspectorEnv::new("rebuilt");
    let (first, second) = (env.create_topic("a", 3).await, env.create_topic("b", 1).await);
    for partition in 0..3 {
        env.put(&first, partition, numbered("old", 50)).await;
    }
    let mut inspector = env.start().await;
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
    inspector.process.shut_down();

    // After a restart, only records that are not indexed yet are read.
    env.put(&second, 0, numbered("new", 7)).await;
    let mut inspector = env.start().await;
    assert_eq!(inspector.process.word_after(" index="), "\"existing\"");
    assert_eq!(inspector.list("").await.len(), 157);
    let metrics = inspector.metrics();
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
    let second_page = client
        .list_dead_letters(with_token.clone())
        .await
        .unwrap()
        .into_inner();
    let second_page_before: Vec<String> = second_page
        .dead_letters
        .into_iter()
        .map(|letter| letter.id)
        .collect();
    assert_eq!(second_page_before.len(), 10);
    inspector.process.shut_down();

    for entry in std::fs::read_dir(env.data_dir()).unwrap() {
        std::fs::remove_file(entry.unwrap().path()).unwrap();
    }
    let mut inspector = env.start().await;
    assert_eq!(inspector.process.word_after(" index="), "\"new\"");
    let after = inspector.list("topic != none AND headers.batch = old").await;
    assert_eq!(before, after);
    // A page token is valid in every index.
    let mut client = inspector.client().await;
    let second_page = client.list_dead_letters(with_token).await.unwrap().into_inner();
    assert_eq!(ids(&second_page.dead_letters), second_page_before);
    inspector.process.shut_down();

    // A file that is not a database is replaced.
    std::fs::write(env.data_dir().join(FILE), vec![7; 100_000]).unwrap();
    let mut inspector = env.start().await;
    assert_eq!(inspector.list("").await.len(), 157);
    assert!(
        inspector
            .process
            .output()
            .contains("the index is unusable; rebuilding it")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_and_statistics_of_two_inspectors_agree() {
    let mut env = InspectorEnv::new("replicas");
    let topic = env.create_topic("a", 3).await;
    for partition in 0..3 {
        env.put(&topic, partition, numbered("x", 40)).await;
    }
    let mut first = env.start().await;
    let other_directory = env.base.directory().join("other").display().to_string();
    env.base.set("dlq_inspector.data_dir", &other_directory);
    let mut second = env.start().await;
    let mut clients = [first.client().await, second.client().await];
    let mut request = v1::ListDeadLettersRequest {
        page_size: 7,
        filter: "headers.batch = x".to_owned(),
        ..v1::ListDeadLettersRequest::default()
    };
    let mut seen = Vec::new();
    for turn in 0.. {
        let page = clients[turn % 2].list_dead_letters(request.clone()).await;
        let page = page.unwrap().into_inner();
        seen.extend(page.dead_letters.into_iter().map(|letter| letter.id));
        if page.next_page_token.is_empty() {
            break;
        }
        request.page_token = page.next_page_token;
    }
    let distinct: BTreeSet<&String> = seen.iter().collect();
    assert_eq!((seen.len(), distinct.len()), (120, 120));
    let mut totals = Vec::new();
    for client in &mut clients {
        let stats = client
            .get_dead_letter_stats(v1::GetDeadLetterStatsRequest::default())
            .await;
        let topics = stats.unwrap().into_inner().topics;
        totals.push(
            topics
                .into_iter()
                .map(|topic| (topic.topic, topic.open, topic.oldest))
                .collect::<Vec<_>>(),
        );
    }
    assert_eq!(totals[0], totals[1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_json_field_is_found_after_a_change_of_the_configuration() {
    let mut env = InspectorEnv::new("json");
    let topic = env.create_topic("a", 1).await;
    let order = |id: &str| dead(id, format!(r#"{{"order": {{"id": "{id}"}}}}"#), &[]);
    env.put(
        &topic,
        0,
        vec![order("o-1"), order("o-2"), dead("text", "no JSON", &[])],
    )
    .await;
    let mut inspector = env.start().await;
    assert_eq!(inspector.list("").await.len(), 3);
    inspector.process.shut_down();
    env.base.set("dlq_inspector.json_fields", r#"["/order/id"]"#);
    let mut inspector = env.start().await;
    assert_eq!(inspector.process.word_after(" index="), "\"new\"");
    let found = inspector.list("json./order/id = o-2").await;
    assert_eq!(ids(&found), [format!("{topic}/0/1")]);
    assert_eq!(inspector.list("NOT json./order/id:*").await.len(), 1);
    assert!(!env.data_dir().join(FILE).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_index_that_is_damaged_while_it_is_used_is_rebuilt_by_the_same_process() {
    let env = InspectorEnv::new("damaged");
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, numbered("old", 300)).await;
    env.start().await.process.shut_down();
    let path = env.data_dir().join(FILE);
    let connection = rusqlite::Connection::open(&path).unwrap();
    let size: i64 = connection
        .pragma_query_value(None, "page_size", |row| row.get(0))
        .unwrap();
    let sql = "SELECT rootpage FROM sqlite_master WHERE name = 'bodies'";
    let root: i64 = connection.query_row(sql, (), |row| row.get(0)).unwrap();
    drop(connection);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let offset = u64::try_from((root - 1) * size).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xa5; 512], offset).unwrap();

    // No part of the start reads this page.
    let mut inspector = env.start().await;
    assert_eq!(inspector.process.word_after(" index="), "\"existing\"");
    let request = v1::ListDeadLettersRequest {
        page_size: 1000,
        ..v1::ListDeadLettersRequest::default()
    };
    let mut client = inspector.client().await;
    let watching = v1::WatchDeadLettersRequest {
        only_new: true,
        ..v1::WatchDeadLettersRequest::default()
    };
    let stream = client.watch_dead_letters(watching.clone()).await;
    let mut stream = stream.unwrap().into_inner();
    let synced = stream.message().await.unwrap().unwrap();
    eventually_async(
        "all dead letters are listed again",
        DEADLINE,
        async || match client.list_dead_letters(request.clone()).await {
            Ok(page) => match page.into_inner().dead_letters.len() {
                300 => Ok(()),
                listed => Err(format!("{listed}")),
            },
            Err(status) => Err(status.to_string()),
        },
    )
    .await;
    let output = inspector.process.output();
    assert!(output.contains("the index is damaged; rebuilding it"), "{output}");
    let metrics = inspector.metrics();
    assert!(
        metrics.contains("redeliver_dlq_index_rebuilds_total 1\n"),
        "{metrics}"
    );

    // The watch has begun in the previous index, and goes on in the new one.
    let ended = stream.message().await.unwrap_err();
    assert_eq!(
        (ended.code(), reason(&ended).as_deref()),
        (Code::Unavailable, Some("INDEX_REBUILT"))
    );
    let written = env.put(&topic, 0, numbered("new", 1)).await;
    let resumed = v1::WatchDeadLettersRequest {
        resume_token: synced.resume_token,
        ..watching
    };
    let mut stream = client.watch_dead_letters(resumed).await.unwrap().into_inner();
    let first = loop {
        if let Some(Event::DeadLetter(letter)) = stream.message().await.unwrap().unwrap().event {
            break letter.id;
        }
    };
    assert_eq!(first, written[0].to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_topic_is_removed_and_a_recreated_one_is_read_again() {
    let env = InspectorEnv::new("again");
    let (topic, other) = (env.create_topic("a", 2).await, env.create_topic("b", 1).await);
    env.put(&topic, 0, numbered("old", 20)).await;
    env.put(&topic, 1, numbered("old", 5)).await;
    env.put(&other, 0, numbered("other", 3)).await;
    let mut inspector = env.start().await;
    assert_eq!(inspector.list("").await.len(), 28);
    delete_topic(&env.kafka.brokers, &topic);
    inspector.until_listed("", 3).await;

    // A survey has seen that the topic was missing.
    env.recreate_topic(&topic, 2).await;
    env.put(&topic, 0, numbered("new", 4)).await;
    let listed = inspector.until_listed("headers.batch = new", 4).await;
    assert_eq!(listed[0].position.as_ref().unwrap().topic, &*topic);
    assert_eq!(inspector.list("").await.len(), 7);

    // Recreated so quickly that no survey sees it missing. It has as many records as before, so that only their content
    // differs.
    delete_topic(&env.kafka.brokers, &topic);
    env.recreate_topic(&topic, 2).await;
    env.put(&topic, 0, numbered("third", 4)).await;
    inspector.until_listed("headers.batch = third", 4).await;
    inspector.until_listed("headers.batch = new", 0).await;
    assert_eq!(inspector.list("").await.len(), 7);
    inspector.process.shut_down();

    // Recreated while the inspector is down, with more records than before.
    delete_topic(&env.kafka.brokers, &topic);
    env.recreate_topic(&topic, 2).await;
    env.put(&topic, 0, numbered("fourth", 9)).await;
    let mut inspector = env.start().await;
    assert_eq!(inspector.process.word_after(" index="), "\"existing\"");
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
    inspector.process.shut_down();

    delete_topic(&env.kafka.brokers, &topic);
    let mut inspector = env.start().await;
    inspector.until_listed("", 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_topic_never_mixes_with_its_predecessor() {
    let env = InspectorEnv::new("mixed");
    let topic = env.create_topic("a", 1).await;
    let mut inspector = env.start().await;
    for (count, previous, batch) in [(3, "", "one"), (30, "one", "two"), (300, "two", "three")] {
        if !previous.is_empty() {
            delete_topic(&env.kafka.brokers, &topic);
            env.recreate_topic(&topic, 1).await;
        }
        // There is something at the offset at which the inspector goes on reading.
        env.put(&topic, 0, numbered(batch, count)).await;
        eventually_async("all dead letters of the new topic", DEADLINE, async || {
            let letters = inspector.list("").await;
            let is_new = |key: &[u8]| key.starts_with(batch.as_bytes());
            let new = letters
                .iter()
                .filter(|letter| letter.key.as_deref().is_some_and(is_new));
            let (new, all) = (new.count(), letters.len());
            assert!(new == 0 || new == all, "{batch}: {new} of {all}");
            if new == count {
                Ok(())
            } else {
                Err(format!("{new} of {count}"))
            }
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn records_that_retention_deletes_are_removed_from_the_index() {
    let env = InspectorEnv::new("retention");
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, numbered("old", 10)).await;
    let mut inspector = env.start().await;
    delete_records(&env.kafka.brokers, &topic, 0, 6);
    let left = inspector.until_listed("", 4).await;
    let mut offsets: Vec<&str> = ids(&left)
        .iter()
        .map(|id| id.rsplit('/').next().unwrap())
        .collect();
    offsets.sort_unstable();
    assert_eq!(offsets, ["6", "7", "8", "9"]);
    inspector.process.shut_down();
    // All records are deleted while the inspector is down.
    delete_records(&env.kafka.brokers, &topic, 0, 10);
    let mut inspector = env.start().await;
    inspector.until_listed("", 0).await;
    env.put(&topic, 0, numbered("new", 2)).await;
    let new = inspector.until_listed("", 2).await;
    let found: BTreeSet<&str> = ids(&new).into_iter().collect();
    assert!(found.contains(format!("{topic}/0/10").as_str()), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_that_is_created_later_is_found() {
    let env = InspectorEnv::new("later");
    let mut inspector = env.start().await;
    assert_eq!(inspector.list("").await.len(), 0);
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, numbered("new", 2)).await;
    inspector.until_listed("", 2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ledger_entry_sets_the_state() {
    let env = InspectorEnv::new("ledger");
    let topic = env.create_topic("a", 1).await;
    env.put(&topic, 0, numbered("old", 3)).await;
    let mut inspector = env.start().await;
    let discarded = v1::LedgerEntry {
        state: v1::DeadLetterState::Discarded.into(),
        time: Some(to_timestamp(SystemClock.now())),
        by: "ann".into(),
        note: "test data".into(),
        ..v1::LedgerEntry::default()
    };
    let id = format!("{topic}/0/1");
    env.put_ledger("not an id", Some(discarded.clone())).await;
    env.put_ledger(&id, Some(discarded.clone())).await;
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
            .contains("ignoring invalid ledger entry")
    );

    // An entry with another content hash does not apply.
    let other = v1::LedgerEntry {
        content_hash: vec![1; 16].into(),
        ..discarded.clone()
    };
    env.put_ledger(&format!("{topic}/0/2"), Some(other)).await;
    let matching = v1::LedgerEntry {
        content_hash: inspector.list(&format!("id = {topic}/0/0")).await[0]
            .content_hash
            .clone(),
        state: v1::DeadLetterState::Redriven.into(),
        ..discarded
    };
    env.put_ledger(&format!("{topic}/0/0"), Some(matching)).await;
    inspector.until_listed("state = REDRIVEN", 1).await;
    inspector.until_listed("state = OPEN", 1).await;

    // The states survive the loss of the index, and a tombstone resets a state.
    inspector.process.shut_down();
    std::fs::remove_dir_all(env.data_dir()).unwrap();
    let mut inspector = env.start().await;
    assert_eq!(ids(&inspector.list("state = DISCARDED").await), [id.as_str()]);
    assert_eq!(inspector.list("state = REDRIVEN").await.len(), 1);
    env.put_ledger(&id, None).await;
    eventually_async("the state is reset", DEADLINE, async || {
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
