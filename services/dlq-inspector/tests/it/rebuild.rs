//! The index follows the topics: aborted transactions, retention, deleted and recreated topics, a lost index file, the ledger.

use std::time::Duration;

use redeliver_dlq_inspector::index::FILE;
use redeliver_proto::v1;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use redeliver_testkit::kafka_request::{delete_records, delete_topic};
use redeliver_testkit::{ensure, eventually_async};
use tonic::Code;

use crate::support::{
    DEADLINE, Dead, Inspector, InspectorEnv, assert_refused, dead, get_letter, ids, watch_new,
};

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
async fn aborted_records_are_read_over() {
    let env = InspectorEnv::new("aborted");
    let topic = env.create_topic("a", 2).await;
    env.put(&topic, 0, numbered("first", 2)).await;
    for partition in 0..2 {
        env.put_and_abort(&topic, partition, numbered("never", 3));
    }
    let mut inspector = env.start().await;
    inspector.until_listed("", 2).await;
    env.put_and_abort(&topic, 0, numbered("never", 3));
    env.put(&topic, 0, numbered("last", 1)).await;
    inspector.until_listed("headers.batch = last", 1).await;
    env.put_and_abort(&topic, 0, numbered("never", 3));
    let mut client = inspector.client().await;
    let refused = get_letter(&mut client, &format!("{topic}/0/2")).await;
    assert_eq!(refused.unwrap_err().code(), Code::NotFound);
    // A consumer that has not answered for four surveys is recreated, and there is a survey every two seconds.
    inspector.until_surveyed_after(Duration::from_secs(12)).await;
    assert_eq!(inspector.list("").await.len(), 3);
    let output = inspector.process.output();
    assert!(!output.contains("consumer stalled"), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn index_is_continued_or_rebuilt() {
    let mut env = InspectorEnv::new("rebuilt");
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
    let listed = client.list_dead_letters(page.clone()).await;
    let token = listed.unwrap().into_inner().next_page_token;
    inspector.process.shut_down();

    // After a restart, only records that are not indexed yet are read, and what retention has deleted meanwhile is removed.
    env.put(&second, 0, numbered("new", 7)).await;
    delete_records(&env.kafka.brokers, &first, 2, 50);
    let mut inspector = env.start().await;
    assert_eq!(inspector.process.word_after(" index="), "\"existing\"");
    inspector.until_listed("", 107).await;
    let metrics = inspector.metrics();
    let indexed = |topic: &str| format!("redeliver_dlq_indexed_total{{topic=\"{topic}\"}}");
    assert!(metrics.contains(&format!("{} 7", indexed(&second))), "{metrics}");
    assert!(!metrics.contains(&indexed(&first)), "{metrics}");
    let with_token = v1::ListDeadLettersRequest {
        page_token: token,
        ..page
    };
    let second_page = async |inspector: &mut Inspector| {
        let listed = inspector
            .client()
            .await
            .list_dead_letters(with_token.clone())
            .await;
        let letters = listed.unwrap().into_inner().dead_letters;
        letters.into_iter().map(|letter| letter.id).collect::<Vec<_>>()
    };
    let second_page_before = second_page(&mut inspector).await;
    assert_eq!(second_page_before.len(), 10);
    inspector.process.shut_down();

    // With other fields, the index is another one. A page token is valid in every index.
    env.base.set("dlq_inspector.json_fields", r#"["/order/id"]"#);
    let order = dead("o-1", r#"{"order": {"id": "o-1"}}"#, &[]);
    env.put(&second, 0, vec![order]).await;
    let mut inspector = env.start().await;
    assert_eq!(inspector.process.word_after(" index="), "\"new\"");
    let left: Vec<_> = before
        .into_iter()
        .filter(|letter| letter.position.as_ref().unwrap().partition != 2)
        .collect();
    assert_eq!(
        inspector.list("topic != none AND headers.batch = old").await,
        left
    );
    assert_eq!(second_page(&mut inspector).await, second_page_before);
    let found = inspector.list("json./order/id = o-1").await;
    assert_eq!(ids(&found), [format!("{second}/0/7")]);
    assert!(!env.data_dir().join(FILE).exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_index_is_rebuilt_while_used() {
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
    let mut stream = watch_new(&mut client, "").await;
    let synced = stream.message().await.unwrap().unwrap();
    eventually_async("all are listed again", DEADLINE, async || {
        let page = client.list_dead_letters(request.clone()).await;
        let listed = page.map_err(|status| status.to_string())?.into_inner();
        let count = listed.dead_letters.len();
        ensure(count == 300, count.to_string())
    })
    .await;
    let output = inspector.process.output();
    assert!(output.contains("index damaged; rebuilding it"), "{output}");
    let metrics = inspector.metrics();
    assert!(
        metrics.contains("redeliver_dlq_index_rebuilds_total 1\n"),
        "{metrics}"
    );

    // The watch has begun in the previous index, and goes on in the new one.
    let ended = stream.message().await.unwrap_err();
    assert_refused(&ended, Code::Unavailable, "INDEX_REBUILT");
    let written = env.put(&topic, 0, numbered("new", 1)).await;
    let resumed = v1::WatchDeadLettersRequest {
        resume_token: synced.resume_token,
        only_new: true,
        ..v1::WatchDeadLettersRequest::default()
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
async fn recreated_topic_is_read_again() {
    let env = InspectorEnv::new("again");
    let topic = env.create_topic("a", 2).await;
    env.put(&topic, 0, numbered("old", 20)).await;
    env.put(&topic, 1, numbered("old", 5)).await;
    let mut inspector = env.start().await;
    assert_eq!(inspector.list("").await.len(), 25);
    // A topic that is created later is found.
    let other = env.create_topic("b", 1).await;
    env.put(&other, 0, numbered("other", 3)).await;
    inspector.until_listed("", 28).await;
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
    let of_topic = format!("topic = {topic}");
    eventually_async("the dead letters of the new topic", DEADLINE, async || {
        let letters = inspector.list(&of_topic).await;
        let is_new = |key: &[u8]| key.starts_with(b"third");
        let new = letters.iter();
        let new = new.filter(|letter| letter.key.as_deref().is_some_and(is_new));
        let (new, all) = (new.count(), letters.len());
        assert!(new == 0 || new == all, "{new} of {all}");
        ensure(new == 4, format!("{new} of {all}"))
    })
    .await;
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
        let full = get_letter(&mut client, &letter.id).await.unwrap();
        assert_eq!(full.value.unwrap(), letter.key.unwrap());
    }
    inspector.process.shut_down();

    delete_topic(&env.kafka.brokers, &topic);
    let mut inspector = env.start().await;
    inspector.until_listed("", 3).await;
}
