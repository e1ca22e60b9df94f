//! What callers with scopes for some topics, or without payloads, get from each call.

mod audit;
mod decoded;
mod masking;

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt as _;
use redeliver_proto::Message;
use redeliver_proto::auth::SendToken;
use redeliver_proto::error::reason;
use redeliver_proto::v1;
use redeliver_proto::v1::DeadLetterView;
use redeliver_proto::v1::redrive_service_client::RedriveServiceClient;
use redeliver_proto::v1::watch_dead_letters_response::Event;
use redeliver_service::identity::NewToken;
use redeliver_testkit::{CommandOutput, ensure, eventually_async};
use serde_json::json;
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::group_states::changed;
use crate::support::{
    Client, DEADLINE, Inspector, InspectorEnv, Sending, dead, get_group, get_letter, get_payload, get_stats,
    ids, list_groups, watch_new,
};

/// The secrets of the topics, in keys, values and headers.
const SECRETS: [&str; 3] = ["k3y-secret", "v4lue-secret", "h3ader-secret"];

/// A message that contains whatever a caller got.
#[derive(Default)]
struct Answers(Vec<u8>);

impl Answers {
    fn add(&mut self, message: &impl Message) {
        self.0.extend(message.encode_to_vec());
    }

    fn refused<T: std::fmt::Debug>(&mut self, result: Result<T, Status>) -> (Code, String) {
        let status = result.unwrap_err();
        self.0.extend(status.message().as_bytes());
        self.0.extend(status.details());
        (status.code(), reason(&status).unwrap_or_default())
    }

    fn contain(&self, text: &str) -> bool {
        self.0.windows(text.len()).any(|window| window == text.as_bytes())
    }
}

fn full(filter: &str) -> v1::ListDeadLettersRequest {
    v1::ListDeadLettersRequest {
        filter: filter.to_owned(),
        view: DeadLetterView::Full.into(),
        page_size: 1,
        ..v1::ListDeadLettersRequest::default()
    }
}

/// All pages of a list.
async fn pages(client: &mut Client, filter: &str, answers: &mut Answers) -> Vec<v1::DeadLetter> {
    let mut request = full(filter);
    let mut letters = Vec::new();
    loop {
        let page = client.list_dead_letters(request.clone()).await;
        let page = page.unwrap().into_inner();
        answers.add(&page);
        letters.extend(page.dead_letters);
        if page.next_page_token.is_empty() {
            return letters;
        }
        request.page_token = page.next_page_token;
    }
}

/// Waits until the caller sees the dead letters of both topics.
async fn all_are_listed(client: &Client) {
    until_listed(client, "", 4).await;
}

/// Waits until the caller sees this many dead letters that match.
async fn until_listed(client: &Client, filter: &str, count: usize) {
    eventually_async("the dead letters", DEADLINE, async || {
        let listed = pages(&mut client.clone(), filter, &mut Answers::default()).await;
        ensure(listed.len() == count, listed.len())
    })
    .await;
}

/// What a watch sends up to the end of the existing dead letters.
async fn watched(client: &mut Client, filter: &str, answers: &mut Answers) -> Vec<v1::DeadLetter> {
    let request = v1::WatchDeadLettersRequest {
        filter: filter.to_owned(),
        view: DeadLetterView::Full.into(),
        ..v1::WatchDeadLettersRequest::default()
    };
    let mut stream = client.watch_dead_letters(request).await.unwrap().into_inner();
    let mut letters = Vec::new();
    loop {
        let message = timeout(DEADLINE, stream.next())
            .await
            .expect("an event")
            .unwrap()
            .unwrap();
        answers.add(&message);
        match message.event {
            Some(Event::DeadLetter(letter)) => letters.push(letter),
            Some(Event::Synced(_)) => return letters,
            _ => {}
        }
    }
}

async fn topics(client: &mut Client, filter: &str, answers: &mut Answers) -> Vec<(String, u64, u64)> {
    let stats = get_stats(client, filter).await;
    answers.add(&stats);
    let counts = stats.topics.into_iter();
    counts
        .map(|topic| (topic.topic, topic.total, topic.last_day))
        .collect()
}

/// Counts by fields, with the values of each count in a text.
async fn counts(
    client: &mut Client,
    filter: &str,
    by: &[&str],
    answers: &mut Answers,
) -> Result<Vec<(String, u64)>, Status> {
    let request = v1::GetDeadLetterStatsRequest {
        filter: filter.to_owned(),
        by: by.iter().map(|name| (*name).to_owned()).collect(),
        ..v1::GetDeadLetterStatsRequest::default()
    };
    let counted = client.get_dead_letter_stats(request).await?.into_inner();
    answers.add(&counted);
    let counts = counted.counts.unwrap().counts.into_iter();
    Ok(counts
        .map(|count| (count.values.join(" "), count.count))
        .collect())
}

async fn groups(client: &mut Client, filter: &str, answers: &mut Answers) -> Vec<v1::Group> {
    let page = list_groups(client, filter).await;
    answers.add(&page);
    page.groups
}

/// Each call with a filter is refused for lack of permission.
async fn filter_is_denied(client: &mut Client, filter: &str, answers: &mut Answers) {
    let filter = || filter.to_owned();
    assert_eq!(
        answers.refused(client.list_dead_letters(full(&filter())).await),
        denied()
    );
    let groups = v1::ListGroupsRequest {
        filter: filter(),
        ..v1::ListGroupsRequest::default()
    };
    assert_eq!(answers.refused(client.list_groups(groups).await), denied());
    let stats = v1::GetDeadLetterStatsRequest {
        filter: filter(),
        ..v1::GetDeadLetterStatsRequest::default()
    };
    assert_eq!(
        answers.refused(client.get_dead_letter_stats(stats).await),
        denied()
    );
    let watch = v1::WatchDeadLettersRequest {
        filter: filter(),
        ..v1::WatchDeadLettersRequest::default()
    };
    let watched = client.watch_dead_letters(watch).await.map(drop);
    assert_eq!(answers.refused(watched), denied());
}

pub(crate) struct Callers {
    pub(crate) env: InspectorEnv,
    pub(crate) tokens: BTreeMap<&'static str, NewToken>,
    /// The topics `orders` and `people`.
    pub(crate) topics: [Arc<str>; 2],
}

impl Callers {
    /// An inspector with callers that have these scopes, in which `{orders}` stands for the name of that topic. Each topic has two dead letters
    /// with the secrets.
    async fn new(name: &str, scopes: &[(&'static str, &[&str])]) -> Self {
        let callers = Self::without_dead_letters(name, scopes).await;
        for topic in &callers.topics {
            let value = format!(r#"{{"v":"{}"}}"#, SECRETS[1]);
            let headers = [
                ("tenant", SECRETS[2]),
                // No other test has the same group.
                ("pipeline", callers.env.base.name()),
                ("error-class", "permanent"),
            ];
            let letter = || dead(SECRETS[0], value.clone(), &headers);
            callers.env.put(topic, 0, vec![letter(), letter()]).await;
        }
        callers
    }

    pub(crate) async fn without_dead_letters(name: &str, scopes: &[(&'static str, &[&str])]) -> Self {
        let mut env = InspectorEnv::new(name);
        let topics = [
            env.create_topic("orders", 1).await,
            env.create_topic("people", 1).await,
        ];
        let callers = scopes.iter().map(|(caller, scopes)| {
            let scopes = scopes.iter().map(|scope| scope.replace("{orders}", &topics[0]));
            (*caller, scopes.collect())
        });
        let tokens = env.set_tokens(callers);
        env.base.set("dlq_inspector.json_fields", r#"["/v"]"#);
        Self { env, tokens, topics }
    }

    /// The pipeline of a topic, which has a tier of two hours from now on.
    pub(crate) fn set_pipeline(&mut self, topic: usize) -> String {
        let pipeline = self.topics[topic].strip_suffix("-dlq").unwrap().to_owned();
        let key = format!("pipelines.{pipeline}.retry");
        self.env.base.set(&key, "{ tiers: [2h] }");
        pipeline
    }

    fn token(&self, caller: &str) -> &str {
        &self.tokens[caller].token
    }

    pub(crate) fn interceptor(&self, caller: &str) -> SendToken {
        SendToken::new(Some(self.token(caller))).unwrap()
    }

    /// What a command `dlq` of a caller prints.
    fn run(&self, inspector: &mut Inspector, caller: &str, command: &[&str]) -> CommandOutput {
        let server = format!("http://{}", inspector.process.word_after(" api="));
        let file = self.env.base.directory().join(format!("token-{caller}"));
        std::fs::write(&file, self.token(caller)).unwrap();
        let file = file.display().to_string();
        let connection = ["--server", &server, "--token-file", &file];
        let command = [&["dlq"], command, &connection].concat();
        self.env.base.run("redeliver", &command)
    }

    fn client(&self, channel: &Channel, caller: &str) -> Client {
        Client::new(Sending::new(channel.clone(), self.interceptor(caller)))
    }

    fn redrives(&self, channel: &Channel, caller: &str) -> RedriveServiceClient<Sending> {
        RedriveServiceClient::with_interceptor(channel.clone(), self.interceptor(caller))
    }
}

fn denied() -> (Code, String) {
    (Code::PermissionDenied, "PERMISSION_DENIED".to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn scope_for_topic_hides_other_topics() {
    let scopes: [(&str, &[&str]); 2] = [
        ("all", &["dead-letters:*"]),
        ("orders", &["dead-letters:*:{orders}"]),
    ];
    let callers = Callers::new("topics", &scopes).await;
    let [orders, people] = &callers.topics;
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let mut everything = callers.client(&channel, "all");
    let mut ignored = Answers::default();
    all_are_listed(&everything).await;
    let all = topics(&mut everything, "", &mut ignored).await;
    assert_eq!(all, [(orders.to_string(), 2, 2), (people.to_string(), 2, 2)]);

    let mut client = callers.client(&channel, "orders");
    let mut answers = Answers::default();
    let own = [format!("{orders}/0/1"), format!("{orders}/0/0")];
    // Each is found by another part of the index.
    for filter in [
        "",
        "state = OPEN",
        "topic : dlq",
        "NOT topic : nothing",
        "offset >= 0 OR topic : people",
        r#"key = "k3y-secret""#,
        "headers.tenant : secret OR state = REDRIVEN",
        "json./v : secret",
        "NOT headers.tenant = x",
    ] {
        let mut listed = pages(&mut client, filter, &mut answers).await;
        listed.sort_by(|one, other| other.id.cmp(&one.id));
        assert_eq!(ids(&listed), own, "{filter}");
        let counted = topics(&mut client, filter, &mut answers).await;
        assert_eq!(counted, [(orders.to_string(), 2, 2)], "{filter}");
        let mut sent = watched(&mut client, filter, &mut answers).await;
        sent.sort_by(|one, other| other.id.cmp(&one.id));
        assert_eq!(ids(&sent), own, "{filter}");
        // The other topic has dead letters of the same group, and newer ones.
        let [group] = &groups(&mut client, filter, &mut answers).await[..] else {
            panic!("{filter}");
        };
        let counts = (group.count, group.open, group.trend.iter().sum::<u64>());
        assert_eq!(counts, (2, Some(2), 2), "{filter}");
        assert_eq!(
            (group.topics.len(), &group.topics[0].topic),
            (1, &orders.to_string())
        );
        assert_eq!(group.sample_id, own[0], "{filter}");
        let gotten = get_group(&mut client, &group.id).await.unwrap();
        answers.add(&gotten);
        let completeness = None;
        let gotten = v1::Group {
            completeness,
            ..gotten
        };
        assert_eq!(gotten, *group, "{filter}");
    }
    let by_topic = counts(&mut client, "", &["topic"], &mut answers).await.unwrap();
    assert_eq!(by_topic, [(orders.to_string(), 2)]);
    let [group] = &groups(&mut everything, "", &mut ignored).await[..] else {
        panic!("the dead letters of both topics are a group");
    };
    assert_eq!((group.count, group.topics.len()), (4, 2));
    assert!(group.sample_id.starts_with(&**people));
    assert_eq!(
        get_payload(&mut client, &own[0]).await.unwrap(),
        br#"{"v":"v4lue-secret"}"#
    );
    // A page token of another caller does not lead to other dead letters.
    let first = everything.list_dead_letters(full("")).await.unwrap().into_inner();
    let mut request = full("");
    request.page_token = first.next_page_token;
    let next = client.list_dead_letters(request).await.unwrap().into_inner();
    assert!(
        next.dead_letters
            .iter()
            .all(|letter| letter.position.as_ref().unwrap().topic == **orders)
    );
    answers.add(&next);
    assert!(!answers.contain(people), "an answer names the other topic");

    // What names another topic is refused, whether it exists or not.
    for other in [&**people, "missing-dlq"] {
        let id = format!("{other}/0/0");
        assert_eq!(answers.refused(get_letter(&mut client, &id).await), denied());
        assert_eq!(answers.refused(get_payload(&mut client, &id).await), denied());
        for filter in [
            format!(r#"topic = "{other}""#),
            format!(r#"NOT (state = OPEN AND position.topic != "{other}")"#),
            format!(r#"state = OPEN OR id = "{id}""#),
        ] {
            filter_is_denied(&mut client, &filter, &mut answers).await;
        }
    }

    // A watch does not send what arrives later in another topic, and sends what arrives in its own.
    let mut stream = watch_new(&mut client, "").await;
    callers.env.put(people, 0, vec![dead("k", "v", &[])]).await;
    callers.env.put(orders, 0, vec![dead("k", "v", &[])]).await;
    loop {
        let message = timeout(DEADLINE, stream.next())
            .await
            .expect("an event")
            .unwrap()
            .unwrap();
        if let Some(Event::DeadLetter(letter)) = message.event {
            assert_eq!(letter.id, format!("{orders}/0/2"));
            break;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn caller_without_scope_gets_no_payloads() {
    let scopes: [(&str, &[&str]); 3] = [
        ("all", &["dead-letters:*"]),
        ("metadata", &["dead-letters:read"]),
        ("some", &["dead-letters:read", "dead-letters:payload:{orders}"]),
    ];
    let callers = Callers::new("payloads", &scopes).await;
    let [orders, people] = &callers.topics;
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let everything = callers.client(&channel, "all");
    all_are_listed(&everything).await;
    let mut all = Answers::default();
    pages(&mut everything.clone(), "", &mut all).await;
    assert!(
        SECRETS.iter().all(|secret| all.contain(secret)),
        "the test finds what it looks for"
    );

    let mut some = callers.client(&channel, "some");
    let by_tenant = counts(&mut some, "", &["topic", "headers.tenant"], &mut all)
        .await
        .unwrap();
    let withheld = (format!("{people} <withheld>"), 2);
    assert_eq!(by_tenant, [(format!("{orders} {}", SECRETS[2]), 2), withheld]);

    let mut client = callers.client(&channel, "metadata");
    let mut answers = Answers::default();
    let by_tenant = counts(&mut client, "", &["headers.tenant"], &mut answers).await;
    assert_eq!(answers.refused(by_tenant), denied());
    let id = format!("{people}/0/0");
    let letter = get_letter(&mut client, &id).await.unwrap();
    assert_eq!(letter.payload_withheld(), v1::PayloadWithheld::NoPermission);
    assert_eq!((letter.key.clone(), letter.value_size), (None, Some(20)));
    assert!(letter.content_hash.is_empty());
    answers.add(&letter);
    assert_eq!(pages(&mut client, "", &mut answers).await.len(), 4);
    assert_eq!(watched(&mut client, "", &mut answers).await.len(), 4);
    assert_eq!(topics(&mut client, "", &mut answers).await.len(), 2);
    assert_eq!(groups(&mut client, "", &mut answers).await.len(), 1);
    assert_eq!(answers.refused(get_payload(&mut client, &id).await), denied());
    for filter in ["key : k", "NOT headers.tenant:*", "state = OPEN OR json./v = x"] {
        filter_is_denied(&mut client, filter, &mut answers).await;
    }
    for secret in SECRETS {
        assert!(!answers.contain(secret), "an answer contains {secret}");
        assert!(
            !inspector.process.output().contains(secret),
            "the log contains {secret}"
        );
    }

    // A caller sees payloads of one topic; a filter on payloads, even a negated one, matches nothing
    // elsewhere.
    let mut client = callers.client(&channel, "some");
    for filter in [
        "headers.tenant : secret",
        "NOT headers.tenant = x",
        "key : secret OR state = OPEN",
    ] {
        let listed = pages(&mut client, filter, &mut answers).await;
        assert_eq!(listed.len(), 2, "{filter}");
        assert!(
            listed
                .iter()
                .all(|letter| letter.id.starts_with(&**orders) && letter.key.is_some())
        );
        let counted = topics(&mut client, filter, &mut answers).await;
        assert_eq!(counted, [(orders.to_string(), 2, 2)], "{filter}");
        assert_eq!(
            watched(&mut client, filter, &mut answers).await.len(),
            2,
            "{filter}"
        );
    }
    let mut listed = pages(&mut client, "", &mut Answers::default()).await;
    assert_eq!(listed.len(), 4);
    listed.retain(|letter| letter.payload_withheld() == v1::PayloadWithheld::NoPermission);
    assert!(listed.len() == 2 && listed.iter().all(|letter| letter.id.starts_with(&**people)));
    assert!(get_payload(&mut client, &format!("{orders}/0/0")).await.is_ok());
    assert_eq!(answers.refused(get_payload(&mut client, &id).await), denied());
}

#[tokio::test(flavor = "multi_thread")]
async fn group_change_needs_all_its_topics() {
    let scopes: [(&str, &[&str]); 4] = [
        ("all", &["dead-letters:*"]),
        ("reader", &["dead-letters:read", "dead-letters:operate:{orders}"]),
        ("orders", &["dead-letters:read:{orders}", "dead-letters:operate"]),
        ("blind", &["dead-letters:operate", "dead-letters:read:other-dlq"]),
    ];
    let callers = Callers::new("group-changes", &scopes).await;
    let [_, people] = &callers.topics;
    let mut inspector = callers.env.start().await;
    let channel = inspector.channel().await;
    let [mut all, reader, orders_only, blind] =
        ["all", "reader", "orders", "blind"].map(|caller| callers.client(&channel, caller));
    all_are_listed(&all).await;
    let [group] = &groups(&mut all, "", &mut Answers::default()).await[..] else {
        panic!("the dead letters of both topics are a group");
    };
    let change = v1::ChangeGroupRequest {
        id: group.id.clone(),
        reason: "fixed".to_owned(),
        expected_revision: None,
    };
    let mut answers = Answers::default();
    let not_found = (Code::NotFound, "GROUP_NOT_FOUND".to_owned());
    for (mut client, expected, knows) in [
        // It sees the other topic, and is told what it lacks.
        (reader, denied(), true),
        (orders_only.clone(), denied(), false),
        (blind, not_found, false),
    ] {
        let mute = v1::MuteGroupRequest {
            id: group.id.clone(),
            reason: "known".to_owned(),
            ..v1::MuteGroupRequest::default()
        };
        let note = v1::AnnotateGroupRequest {
            id: group.id.clone(),
            note: "x".to_owned(),
            expected_revision: None,
        };
        let mut answers = Answers::default();
        for refused in [
            answers.refused(client.resolve_group(change.clone()).await),
            answers.refused(client.reopen_group(change.clone()).await),
            answers.refused(client.mute_group(mute).await),
            answers.refused(client.annotate_group(note).await),
        ] {
            assert_eq!(refused, expected);
        }
        assert_eq!(answers.contain(people), knows);
    }
    // Groups without dead letters may have had some in any topic.
    let without = v1::ListGroupsRequest {
        without_dead_letters: true,
        ..v1::ListGroupsRequest::default()
    };
    let refused = answers.refused(orders_only.clone().list_groups(without.clone()).await);
    assert_eq!(refused, denied());
    assert!(all.list_groups(without).await.is_ok());
    let resolved = changed(async || all.clone().resolve_group(change.clone()).await).await;
    assert_eq!((&*resolved.state_by, resolved.revision), ("token:all", 1));

    // A dead letter in a topic that a caller does not see does not change what it is told.
    let mut orders_only = orders_only;
    let headers = [
        ("pipeline", callers.env.base.name()),
        ("error-class", "permanent"),
    ];
    callers.env.put(people, 0, vec![dead("k", "v", &headers)]).await;
    eventually_async("the group is regressed", DEADLINE, async || {
        let found = groups(&mut all.clone(), "", &mut Answers::default()).await;
        let states: Vec<_> = found.iter().map(v1::Group::state).collect();
        ensure(states == [v1::GroupState::Regressed], format!("{states:?}"))
    })
    .await;
    let seen = groups(&mut orders_only, "", &mut answers).await;
    assert_eq!((seen.len(), seen[0].state()), (1, v1::GroupState::Resolved));
    assert!(!answers.contain(people), "an answer names the other topic");
}
