//! Groups of dead letters that fail for the same reason.

use redeliver_proto::v1;
use redeliver_testkit::kafka_request::delete_records;
use redeliver_testkit::{ensure, eventually_async};
use tonic::Code;

use crate::support::{DEADLINE, Dead, Inspector, InspectorEnv, assert_refused, dead, get_group};

fn failed(code: &str, message: &str) -> Dead {
    let headers = [
        ("pipeline", "crawl"),
        ("error-class", "permanent"),
        ("error-code", code),
        ("error-message", message),
        ("error-timestamp", "2026-01-01T00:00:00.000Z"),
    ];
    dead("k", "v", &headers)
}

/// The trend moves on with the hour.
fn without_hours(group: v1::Group) -> v1::Group {
    let total = group.trend.iter().sum();
    v1::Group {
        trend: vec![total],
        ..group
    }
}

/// All groups, without what depends on the time.
async fn groups(inspector: &mut Inspector, filter: &str, page_size: i32) -> Vec<v1::Group> {
    let mut client = inspector.client().await;
    let mut request = v1::ListGroupsRequest {
        filter: filter.to_owned(),
        page_size,
        order_by: "count desc".to_owned(),
        ..v1::ListGroupsRequest::default()
    };
    let mut groups = Vec::new();
    loop {
        let page = client.list_groups(request.clone()).await.unwrap().into_inner();
        groups.extend(page.groups.into_iter().map(without_hours));
        if page.next_page_token.is_empty() {
            return groups;
        }
        request.page_token = page.next_page_token;
    }
}

fn counts(groups: &[v1::Group]) -> Vec<(&str, u64, Option<u64>)> {
    let count = |group: &v1::Group| group.count;
    assert!(groups.is_sorted_by(|one, other| count(one) >= count(other)));
    groups
        .iter()
        .map(|group| (group.template.as_str(), group.count, group.open))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_cause_is_one_group_everywhere() {
    let mut env = InspectorEnv::new("groups");
    let (a, b) = (env.create_topic("a", 2).await, env.create_topic("b", 1).await);
    let timeouts = |numbers: std::ops::Range<u32>| {
        let messages = numbers.map(|number| format!("timeout of order {number} after 3 s"));
        messages.map(|message| failed("timeout", &message)).collect()
    };
    env.put(&a, 0, timeouts(0..4)).await;
    env.put(&a, 1, timeouts(4..5)).await;
    env.put(&b, 0, timeouts(5..7)).await;
    let users = ["ann", "bob"].map(|user| failed("http.404", &format!("no user '{user}'")));
    let newest = env.put(&b, 0, users.to_vec()).await;
    let mut first = env.start().await;
    let timeout = "timeout of order <number> after <number> s";
    let expected = [(timeout, 7, Some(7)), ("no user <quoted>", 2, Some(2))];
    let found = groups(&mut first, "", 1).await;
    assert_eq!(counts(&found), expected);
    let unknown_users = &found[1];
    assert_eq!(unknown_users.sample_id, newest[1].to_string());
    assert_eq!(unknown_users.trend.iter().sum::<u64>(), 2);
    let topics: Vec<(&str, u64)> = found[0]
        .topics
        .iter()
        .map(|topic| (topic.topic.as_str(), topic.count))
        .collect();
    assert_eq!(topics, [(&*a, 5), (&*b, 2)]);
    let of_a = groups(&mut first, &format!("topic = {a}"), 50).await;
    assert_eq!(counts(&of_a), [(timeout, 5, Some(5))]);
    let listed = first
        .list(&format!("group = {} AND topic = {b}", found[0].id))
        .await;
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|letter| letter.group == found[0].id));

    let mut client = first.client().await;
    let got = get_group(&mut client, &found[0].id).await.unwrap();
    assert!(got.completeness.is_some());
    let completeness = None;
    assert_eq!(without_hours(v1::Group { completeness, ..got }), found[0]);
    for (id, code, expected) in [
        ("0", Code::InvalidArgument, "ID_INVALID"),
        ("0000000000000000", Code::NotFound, "GROUP_NOT_FOUND"),
    ] {
        let refused = get_group(&mut client, id).await.unwrap_err();
        assert_refused(&refused, code, expected);
    }

    // Another inspector has the same groups.
    let directory = env.data_dir();
    env.use_data_dir("other");
    let mut second = env.start().await;
    assert_eq!(groups(&mut second, "", 1).await, found);

    // A rebuilt index does not change them.
    first.process.shut_down();
    env.base
        .set("dlq_inspector.data_dir", &directory.display().to_string());
    std::fs::remove_dir_all(&directory).unwrap();
    let mut first = env.start().await;
    assert_eq!(groups(&mut first, "", 50).await, found);

    // New groups count once the index has caught up.
    let new_groups = "redeliver_dlq_groups_first_seen_total";
    assert_eq!(first.process.metric(new_groups), 0);
    let known = failed("timeout", "timeout of order 7 after 9 s");
    env.put(&b, 0, vec![failed("http.404", "no order"), known]).await;
    first.process.until_metric(new_groups, |count| count == 1);

    // Retention removes dead letters, and groups without dead letters.
    delete_records(&env.kafka.brokers, &b, 0, 4);
    let expected = [(timeout, 6, Some(6)), ("no order", 1, Some(1))];
    eventually_async("the groups of what is left", DEADLINE, async || {
        let found = groups(&mut first, "", 50).await;
        // The order of groups with the same count is that of their ids.
        ensure(counts(&found) == expected, format!("{found:?}"))
    })
    .await;
}
