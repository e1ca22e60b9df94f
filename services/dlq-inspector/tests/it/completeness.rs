//! Every answer says whether it is complete.

use redeliver_core::{Clock as _, SystemClock};
use redeliver_dlq_inspector::ledger;
use redeliver_proto::convert::to_timestamp;
use redeliver_proto::v1;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use redeliver_testkit::local_kafka::kafka_tool;
use redeliver_testkit::{LocalKafka, ensure, eventually_async, run};
use tonic::Code;

use crate::support::{
    DEADLINE, InspectorEnv, assert_refused, dead, get_letter, get_page, get_stats, ids, watch_new,
};

/// Permits everything that no rule forbids.
pub(crate) const AUTHORIZER: [(&str, &str); 2] = [
    (
        "authorizer.class.name",
        "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    ),
    ("allow.everyone.if.no.acl.found", "true"),
];

fn change_acls(kafka: &LocalKafka, change: &[&str], topics: &[&str]) {
    let mut command = kafka_tool("org.apache.kafka.tools.AclCommand").unwrap();
    command
        .args(["--bootstrap-server", &kafka.brokers()])
        .args(change);
    for topic in topics {
        command.args(["--topic", topic]);
    }
    let output = run(command);
    assert_eq!(output.code, Some(0), "{output:?}");
}

/// Permits everything on these topics, which otherwise nothing would be once they have a rule.
pub(crate) fn allow_all(kafka: &LocalKafka, topics: &[&str]) {
    let change = ["--add", "--allow-principal", "User:*", "--operation", "All"];
    change_acls(kafka, &change, topics);
}

/// Adds a rule that denies this for these topics to all.
pub(crate) fn deny(kafka: &LocalKafka, operation: &str, topics: &[&str]) {
    let change = [
        "--add",
        "--deny-principal",
        "User:ANONYMOUS",
        "--operation",
        operation,
    ];
    change_acls(kafka, &change, topics);
}

/// Removes the rule.
pub(crate) fn allow_again(kafka: &LocalKafka, operation: &str, topics: &[&str]) {
    let rule = ["--deny-principal", "User:ANONYMOUS", "--operation", operation];
    change_acls(kafka, &[&["--remove", "--force"], &rule[..]].concat(), topics);
}

/// The missing partitions of this topic, as far as they are listed.
fn missing(completeness: &v1::Completeness, topic: &str) -> Vec<(Option<i32>, v1::MissingReason)> {
    let missing = completeness
        .missing
        .iter()
        .filter(|missing| missing.topic == topic);
    missing
        .map(|missing| (missing.partition, missing.reason()))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_name_unreadable_topics() {
    let kafka = LocalKafka::start_with(&AUTHORIZER).unwrap();
    let env = InspectorEnv::on("partial", &kafka.brokers());
    let (open, closed) = (
        env.create_topic("open", 1).await,
        env.create_topic("closed", 1).await,
    );
    env.put(&open, 0, vec![dead("a", "v", &[]), dead("b", "v", &[])])
        .await;
    env.put(&closed, 0, vec![dead("c", "v", &[])]).await;
    // The first start creates the ledger.
    env.start().await.process.shut_down();
    std::fs::remove_dir_all(env.data_dir()).unwrap();
    let discarded = v1::LedgerEntry {
        state: v1::DeadLetterState::Discarded.into(),
        time: Some(to_timestamp(SystemClock.now())),
        ..v1::LedgerEntry::default()
    };
    let first = format!("{open}/0/0");
    env.put_ledger(&first, Some(discarded)).await;
    let both = [&*closed, ledger::TOPIC];
    allow_all(&kafka, &both);
    deny(&kafka, "Read", &both);

    let mut inspector = env.start().await;
    let mut client = inspector.client().await;
    let page = get_page(&mut client, "").await.unwrap();
    let completeness = page.completeness.unwrap();
    assert!(
        !completeness.complete && completeness.as_of.is_some(),
        "{completeness:?}"
    );
    assert_eq!(
        missing(&completeness, &closed),
        [(Some(0), v1::MissingReason::Refused)]
    );
    let mut errors = completeness.missing.iter().map(|missing| &missing.error);
    assert!(
        errors.all(|error| error.contains("authorization")),
        "{completeness:?}"
    );
    assert!(!completeness.states_known && completeness.missing_count > 1);
    // The discarded one must not look open, or it could be processed again.
    let states: Vec<_> = page.dead_letters.iter().map(v1::DeadLetter::state).collect();
    assert_eq!(states, [v1::DeadLetterState::Unspecified; 2]);
    let letter = get_letter(&mut client, &first).await.unwrap();
    assert_eq!(letter.state(), v1::DeadLetterState::Unspecified);
    assert!(!letter.completeness.unwrap().states_known);
    let stats_before = get_stats(&mut client, "").await;
    assert!(!stats_before.completeness.as_ref().unwrap().complete);
    let counts = |stats: &v1::DeadLetterStats| -> Vec<(Option<u64>, u64)> {
        let topics = stats.topics.iter();
        topics.map(|topic| (topic.open, topic.total)).collect()
    };
    assert_eq!(counts(&stats_before), [(None, 0), (None, 2)]);
    let filtered = get_page(&mut client, "state = OPEN").await.unwrap_err();
    assert_refused(&filtered, Code::Unavailable, "STATES_UNKNOWN");
    // Only in a topic that was read, a missing dead letter certainly does not exist.
    let unknown = get_letter(&mut client, &format!("{closed}/0/0"))
        .await
        .unwrap_err();
    assert_refused(&unknown, Code::Unavailable, "INDEX_INCOMPLETE");
    let gone = get_letter(&mut client, &format!("{open}/0/99"))
        .await
        .unwrap_err();
    assert_eq!(gone.code(), Code::NotFound);
    let mut watch = watch_new(&mut client, "").await;
    match watch.message().await.unwrap().unwrap().event.unwrap() {
        Event::Synced(synced) => assert!(!synced.completeness.unwrap().complete),
        event => panic!("{event:?}"),
    }
    let readiness = inspector.process.get("/readyz").1;
    assert!(
        readiness.contains("partitions are missing in answers"),
        "{readiness}"
    );

    allow_again(&kafka, "Read", &both);
    eventually_async("everything is read", DEADLINE, async || {
        let page = get_page(&mut client, "").await.unwrap();
        let completeness = page.completeness.clone().unwrap();
        let holds = completeness.complete && page.dead_letters.len() == 3;
        ensure(holds, format!("{completeness:?}"))
    })
    .await;
    assert_eq!(ids(&inspector.list("state = DISCARDED").await), [first.as_str()]);
    let stats = get_stats(&mut client, "").await;
    assert_eq!(counts(&stats), [(Some(1), 1), (Some(1), 2)]);
    // A consumer that is refused is not a consumer that has stalled.
    assert!(!inspector.process.output().contains("consumer stalled"));

    // A watch with a filter on the state ends once it would need the states that it does not know.
    let mut open_ones = watch_new(&mut client, "state = OPEN").await;
    deny(&kafka, "Read", &[ledger::TOPIC]);
    eventually_async("the states are unknown", DEADLINE, async || {
        let completeness = get_page(&mut client, "").await.unwrap().completeness.unwrap();
        ensure(!completeness.states_known, format!("{completeness:?}"))
    })
    .await;
    env.put(&open, 0, vec![dead("d", "v", &[])]).await;
    let end = loop {
        match open_ones.message().await {
            Ok(Some(message)) => {
                let event = message.event.unwrap();
                assert!(!matches!(event, Event::DeadLetter(_)), "{event:?}");
            }
            Ok(None) => panic!("the watch ended without a status"),
            Err(status) => break status,
        }
    };
    assert_refused(&end, Code::Unavailable, "STATES_UNKNOWN");
    allow_again(&kafka, "Read", &[ledger::TOPIC]);

    // A topic that may not even be described looks as if it did not exist. It stays in the index.
    deny(&kafka, "Describe", &[&*closed]);
    eventually_async("the topic is missing", DEADLINE, async || {
        let page = get_page(&mut client, "").await.unwrap();
        let missing = missing(&page.completeness.unwrap(), &closed);
        assert_eq!(page.dead_letters.len(), 4);
        let holds = missing == [(None, v1::MissingReason::Refused)];
        ensure(holds, format!("{missing:?}"))
    })
    .await;
}
