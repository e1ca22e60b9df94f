//! Failures of Redis: restarts, outages, a full memory, an older copy, and removed keys.

use std::collections::BTreeMap;

use fred::prelude::Value;
use redeliver_kafka::TopicId;
use redeliver_scheduler::index::redis::{ConnectError, RedisIndex};
use redeliver_scheduler::index::{
    Batch, Change, Effect, Index, IndexError, Installation, Lookup, MemoryPressure,
};
use redeliver_scheduler::job::Flow;
use redeliver_testkit::{DEADLINE, LocalRedis, eventually_async, redis_url};

use super::cases::{
    ME, OTHER, SHARD, all, apply, at, batch, begin, due_scan, ended, flow, flow_of, forgotten, id, waits,
    waits_in, with_key,
};
use super::own_redis::{OwnRedis, Raw, config, connect, connect_as, installation};
use super::proxy::Proxy;

/// The reason of [`IndexError::Unavailable`].
fn unavailable<T: std::fmt::Debug>(answer: Result<T, IndexError>) -> Result<String, String> {
    match answer {
        Err(IndexError::Unavailable(reason)) => Ok(reason),
        other => Err(format!("{other:?}")),
    }
}

async fn until_available(redis: &OwnRedis) {
    let what = "the index answers";
    eventually_async(what, DEADLINE, async || redis.index.ping().await).await;
}

#[tokio::test]
async fn flushed_scripts_are_sent_again() {
    let local = LocalRedis::start().unwrap();
    let redis = OwnRedis::connect_to(&local.url()).await;
    begin(&redis.index, vec![waits(1, 5)]).await;
    redis.raw.call(&["SCRIPT", "FLUSH"]).await;
    // Several concurrent calls find no script, and still take effect in order.
    let batches: Vec<_> = (10..60)
        .map(|offset| batch(offset, offset + 1, vec![waits(1, offset)]))
        .collect();
    let calls = batches
        .iter()
        .map(|batch| redis.index.apply(SHARD, ME, batch, at(0)));
    for answer in futures::future::join_all(calls).await {
        answer.unwrap();
    }
    assert_eq!(all(&redis.index, 10).await, [(59, 1)]);
    let claimed = redis.index.claim(SHARD, ME).await.unwrap().unwrap();
    assert_eq!(claimed.applied.offset, 60);
}

#[tokio::test]
async fn older_copy_has_older_checkpoint() {
    let redis = OwnRedis::connect().await;
    begin(&redis.index, vec![waits(1, 5), waits(2, 5)]).await;
    let mut copy = Vec::new();
    for key in redis.keys().await {
        let dump = redis.raw.call_with(vec!["DUMP".into(), key.clone()]).await;
        copy.push((key, dump));
    }
    apply(&redis.index, 10, 20, vec![ended(1, 9)]).await.unwrap();
    redis.remove().await;
    for (key, dump) in copy {
        redis
            .raw
            .call_with(vec!["RESTORE".into(), key, 0.into(), dump])
            .await;
    }
    // The copy contains an ended job, but also its old checkpoint.
    let ahead = due_scan(&redis.index, None, at(5), 10, 1000).await.unwrap();
    assert_eq!((ahead.applied.unwrap().offset, ahead.rows.len()), (10, 2));
    let gap = Err("Gap { found: Some(10), expected: 20 }".to_owned());
    assert_eq!(apply(&redis.index, 20, 30, vec![ended(2, 9)]).await, gap);
    apply(&redis.index, 8, 30, vec![ended(1, 9), ended(2, 9)])
        .await
        .unwrap();
    assert_eq!(all(&redis.index, 10).await, []);
    redis.remove().await;
}

#[tokio::test]
async fn another_format_keeps_its_checkpoint() {
    let redis = OwnRedis::connect().await;
    begin(&redis.index, vec![waits(1, 5)]).await;
    let meta = redis.key(SHARD, "meta");
    // Another format may count other keys.
    redis
        .raw
        .call(&["HSET", &meta, "format", "99", "counts", "1 2 3"])
        .await;
    let seen = due_scan(&redis.index, None, at(6), 10, 1000).await.unwrap();
    assert_eq!((seen.applied, seen.rows.len()), (None, 0));
    let offset = redis.raw.call(&["HGET", &meta, "offset"]).await;
    assert_eq!(offset.as_string().as_deref(), Some("10"));
    let claimed = redis.index.claim(SHARD, OTHER).await.unwrap().unwrap();
    assert_eq!(claimed.format, 99);
    redis.remove().await;
}

/// The due sets of jobs 1 and 2000.
const DUE_SETS: [&str; 2] = ["due:1:mail-jobs:mail", "due:1:sms-jobs:sms"];

/// The offset of the index according to a query, or `None` if it lacks something.
async fn offset_by(query: &str, index: &RedisIndex) -> Option<i64> {
    let applied = match query {
        "claim" => index.claim(SHARD, ME).await.unwrap().map(|found| found.applied),
        // Job 2000 is not part of it.
        "scan" => due_scan(index, None, at(5), 10, 1000).await.unwrap().applied,
        "forgettable" => index.forgettable(SHARD, at(0), 10).await.unwrap().0,
        "lookup" => {
            let lookups = [Lookup::Job(id(1)), Lookup::Job(id(2000)), Lookup::Job(id(7))];
            index.look_up(SHARD, &lookups, at(0)).await.unwrap().0
        }
        "count" => {
            let stats = index.stats(SHARD, None, at(0), 1).await.unwrap();
            assert!(stats.applied.is_some() || stats.scheduled == 0, "{stats:?}");
            stats.applied
        }
        _ => {
            let nothing_new = batch(9, 10, vec![]);
            return match index.apply(SHARD, ME, &nothing_new, at(0)).await {
                Ok(()) => Some(10),
                Err(IndexError::Gap { found, .. }) => found,
                Err(error) => panic!("{error}"),
            };
        }
    };
    applied.map(|applied| applied.offset)
}

#[tokio::test]
async fn lost_keys_are_detected() {
    let [first, second] = DUE_SETS;
    let redis = OwnRedis::connect().await;
    let begin = async || begin(&redis.index, vec![waits(1, 5), waits(2000, 500), ended(3, 900)]).await;
    for (query, of_query) in [
        ("claim", &[first, second, "recent", "job:0", "job:1"][..]),
        ("scan", &[first, "job:0"]),
        ("forgettable", &["recent"]),
        ("lookup", &["job:1"]),
        ("count", &[first, second]),
        ("apply", &["recent"]),
    ] {
        for name in ["flows", "sizes", "ended", "buckets", "meta"]
            .iter()
            .chain(of_query)
        {
            begin().await;
            assert_eq!(
                offset_by(query, &redis.index).await,
                Some(10),
                "{query}: all is there"
            );
            let key = redis.key(SHARD, name);
            assert_eq!(redis.raw.call(&["DEL", &key]).await.as_i64(), Some(1), "{name}");
            assert_eq!(
                offset_by(query, &redis.index).await,
                None,
                "{query} without {name}"
            );
        }
    }
    // After a rebuild, all is as before.
    begin().await;
    assert_eq!(all(&redis.index, 10).await, [(5, 1), (500, 2000)]);
    redis.remove().await;
}

#[tokio::test]
async fn change_beside_lost_keys_is_gap() {
    let [mail, sms] = DUE_SETS;
    // Jobs that are forgotten although they have not ended, too.
    for (lost, change) in [
        (mail, waits(5, 5)),
        (mail, ended(1, 5)),
        (sms, forgotten(4000)),
        ("job:0", waits(5, 5)),
        ("job:0", waits(3, 5)),
        ("job:0", ended(1, 5)),
        ("job:0", forgotten(3)),
        ("job:0", forgotten(1)),
    ] {
        let redis = OwnRedis::connect().await;
        let jobs = vec![waits(1, 5), ended(3, 900), waits(2000, 500), waits(4000, 600)];
        begin(&redis.index, jobs).await;
        redis.raw.call(&["DEL", &redis.key(SHARD, lost)]).await;
        let refused = apply(&redis.index, 10, 11, vec![change]).await;
        assert_eq!(
            refused,
            Err("Gap { found: None, expected: 10 }".to_owned()),
            "{lost}"
        );
        assert_eq!(redis.index.claim(SHARD, ME).await.unwrap(), None);
        redis.remove().await;
    }
}

#[tokio::test]
async fn changed_keys_are_detected() {
    let [mail, _] = DUE_SETS;
    let id_1 = || Value::from(&id(1).to_bytes()[..]);
    let ghost = || Value::from(&id(77).to_bytes()[..]);
    let changes: [(&str, Vec<Value>); 6] = [
        ("ZADD", vec![mail.into(), 3.into(), ghost()]),
        ("ZADD", vec!["due:1:t:other".into(), 3.into(), ghost()]),
        ("ZADD", vec!["flows".into(), 700.into(), DUE_SETS[0][4..].into()]),
        ("HSET", vec!["sizes".into(), DUE_SETS[0][4..].into(), 2.into()]),
        ("HDEL", vec!["job:0".into(), id_1()]),
        ("ZADD", vec!["ended".into(), 3.into(), ghost()]),
    ];
    for (number, (command, mut words)) in changes.into_iter().enumerate() {
        let redis = OwnRedis::connect().await;
        begin(&redis.index, vec![waits(1, 5), waits(2000, 500), ended(3, 900)]).await;
        words[0] = redis.key(SHARD, words[0].as_str().unwrap().as_ref()).into();
        words.insert(0, command.into());
        redis.raw.call_with(words).await;
        let claimed = redis.index.claim(SHARD, ME).await.unwrap();
        // A due set that is not listed is never read.
        assert_eq!(claimed.is_some(), number == 1, "change {number}");
        begin(&redis.index, vec![waits(1, 5)]).await;
        let flow = Flow {
            topic: "t".into(),
            ..flow("other")
        };
        apply(&redis.index, 10, 11, vec![waits_in(&flow, 5, 6)])
            .await
            .unwrap();
        assert_eq!(all(&redis.index, 10).await, [(5, 1), (6, 5)]);
        assert!(redis.index.claim(SHARD, ME).await.unwrap().is_some());
        redis.remove().await;
    }
}

#[tokio::test]
async fn rebuild_removes_unlisted_due_sets() {
    let redis = OwnRedis::connect().await;
    for lost in [&["flows"][..], &["sizes"], &["flows", "sizes"]] {
        begin(&redis.index, vec![waits(1, 5), waits(2000, 500)]).await;
        for name in lost {
            redis.raw.call(&["DEL", &redis.key(SHARD, name)]).await;
        }
        begin(&redis.index, vec![]).await;
        // In a later batch than the first one.
        apply(&redis.index, 10, 11, vec![waits(3, 7)]).await.unwrap();
        assert_eq!(all(&redis.index, 10).await, [(7, 3)], "without {lost:?}");
        assert!(redis.index.claim(SHARD, ME).await.unwrap().is_some());
    }
    redis.remove().await;
}

/// All keys that begin with this text, with their content.
async fn dump(redis: &OwnRedis, prefix: &str) -> BTreeMap<Vec<u8>, Value> {
    let mut found = BTreeMap::new();
    for key in redis.keys_of(prefix).await {
        let dump = redis.raw.call_with(vec!["DUMP".into(), key.clone()]).await;
        found.insert(key.as_bytes().unwrap().to_vec(), dump);
    }
    found
}

#[tokio::test]
async fn recreated_topic_index_is_not_used() {
    let redis = OwnRedis::connect().await;
    begin(&redis.index, vec![waits(1, 5)]).await;
    let recreated = Installation {
        topic_id: Some(TopicId::from_bits(2)),
        ..installation()
    };
    let (index, _tasks) = connect_as(&redis.config, recreated).await.unwrap();
    assert_eq!(index.used_by_another(SHARD).await.unwrap(), None);
    let fenced =
        |answer: Result<(), IndexError>| assert!(matches!(answer, Err(IndexError::Fenced)), "{answer:?}");
    fenced(index.look_up(SHARD, &[], at(0)).await.map(drop));
    assert_eq!(index.claim(SHARD, OTHER).await.unwrap(), None);
    assert_eq!(all(&index, 10).await, []);
    index.clear(SHARD, OTHER).await.unwrap();
    index
        .apply(SHARD, OTHER, &batch(0, 20, vec![waits(2, 6)]), at(0))
        .await
        .unwrap();
    assert_eq!(all(&index, 10).await, [(6, 2)]);
    // A process that knows only the previous topic sees nothing of it, with or without a claim.
    fenced(redis.index.look_up(SHARD, &[], at(0)).await.map(drop));
    fenced(
        redis
            .index
            .of_owner(ME, 10)
            .forgettable(SHARD, at(0), 1)
            .await
            .map(drop),
    );
    fenced(redis.index.apply(SHARD, ME, &batch(10, 30, vec![]), at(0)).await);
    redis.remove().await;
}

#[tokio::test]
async fn prefix_in_use_is_refused() {
    let redis = OwnRedis::connect().await;
    begin(&redis.index, vec![waits(1, 5)]).await;
    let other = Installation {
        topic: "staging.state".into(),
        ..installation()
    };
    let (index, _tasks) = connect_as(&redis.config, other).await.unwrap();
    let name = Some("cluster/state".to_owned());
    assert_eq!(index.used_by_another(SHARD).await.unwrap(), name);
    let reason = unavailable(index.claim(SHARD, OTHER).await).unwrap();
    assert!(
        reason.contains("redis.prefix") && reason.contains("cluster/state"),
        "{reason}"
    );
    assert_eq!(all(&redis.index, 10).await, [(5, 1)]);
    // Each use counts, also one that changes nothing, but not 30 seconds later.
    let meta = redis.key(SHARD, "meta");
    let age = async |seconds: u64| {
        let seen = redis.raw.call(&["HGET", &meta, "seen"]).await.as_u64().unwrap() - seconds;
        redis.raw.call(&["HSET", &meta, "seen", &seen.to_string()]).await;
    };
    age(31).await;
    assert_eq!(index.used_by_another(SHARD).await.unwrap(), None);
    let owner = redis.index.of_owner(ME, 10);
    owner.known_keys(SHARD, at(0)).await.unwrap();
    assert_eq!(index.used_by_another(SHARD).await.unwrap(), name);
    age(31).await;
    owner.apply(SHARD, ME, &Batch::renewal(10), at(1)).await.unwrap();
    assert_eq!(index.used_by_another(SHARD).await.unwrap(), name);
    age(31).await;
    assert_eq!(index.claim(SHARD, OTHER).await.unwrap(), None);
    assert_eq!(all(&index, 10).await, []);
    redis.remove().await;
}

#[tokio::test]
async fn only_clearing_connection_may_fill_shard() {
    // Two connections with one owner: a call of one of them from before an outage may arrive after the calls of the other,
    // and must not start the shard.
    let redis = OwnRedis::connect().await;
    let (late, _tasks) = connect(&redis.config).await.unwrap();
    late.claim(SHARD, ME).await.unwrap();
    late.clear(SHARD, ME).await.unwrap();
    redis.index.clear(SHARD, ME).await.unwrap();
    let gap = Err("Gap { found: None, expected: 100 }".to_owned());
    assert_eq!(apply(&late, 100, 200, vec![waits(1, 5)]).await, gap);
    apply(&redis.index, 0, 100, vec![waits(2, 5)]).await.unwrap();
    // A late clear removes everything, which is detected.
    late.clear(SHARD, ME).await.unwrap();
    assert_eq!(apply(&redis.index, 100, 200, vec![waits(1, 5)]).await, gap);
    redis.remove().await;
}

#[tokio::test]
async fn forgotten_jobs_leave_no_keys() {
    let redis = OwnRedis::connect().await;
    let jobs = (0..3000).map(|job| with_key(waits(job, 5), u8::try_from(job % 200).unwrap(), 100_000 + job));
    begin(&redis.index, jobs.collect()).await;
    let names = redis.names(SHARD).await;
    let of = |kind: &str| names.iter().filter(|name| name.starts_with(kind)).count();
    assert_eq!(
        (of("job:"), of("idem:"), of("idemlog:")),
        (3, 200, 1),
        "{names:?}"
    );

    apply(&redis.index, 10, 11, (0..3000).map(forgotten).collect())
        .await
        .unwrap();
    let left = redis.names(SHARD).await;
    assert!(
        left.iter().all(|name| name == "meta" || name.starts_with("idem")),
        "{left:?}"
    );
    redis.index.clear(SHARD, ME).await.unwrap();
    assert_eq!(redis.names(SHARD).await, ["meta"]);
    redis.remove().await;
}

#[tokio::test]
async fn reused_key_never_fills_redis() {
    let redis = OwnRedis::connect().await;
    begin(&redis.index, vec![]).await;
    // Debounced for two days, every five minutes, with a window of one day.
    let (day, pause) = (86_400_000, 300_000);
    for use_number in 0..2 * day / pause {
        let now = use_number * pause;
        let change = with_key(waits(1, now + 1_000), 1, now + day);
        let from = 10 + use_number;
        let used = batch(from, from + 1, vec![change]);
        redis.index.apply(SHARD, ME, &used, at(now)).await.unwrap();
    }
    let names = redis.names(SHARD).await;
    let logs = names.iter().filter(|name| name.starts_with("idemlog:")).count();
    assert!((1..64).contains(&logs), "{logs}");
    redis.index.clear(SHARD, ME).await.unwrap();
    assert_eq!(redis.names(SHARD).await, ["meta"]);
    redis.remove().await;
}

#[tokio::test]
async fn lost_eviction_log_is_detected() {
    let redis = OwnRedis::connect().await;
    let index = redis.index.clone().with_max_ended(1);
    let applied = async || index.forgettable(SHARD, at(1_000_000), 10).await.unwrap().0;
    let log_of = |forget| redis.key(SHARD, &format!("evicted:{}", at(forget).as_millis() >> 18));
    for lost in ["evicted", "the log"] {
        begin(&index, vec![ended(1, 5), ended(2, 5), ended(3, 5)]).await;
        assert!(applied().await.is_some());
        let names = redis.names(SHARD).await;
        let log = names.iter().find(|name| name.starts_with("evicted:")).unwrap();
        let lost = if lost == "evicted" { lost } else { log };
        redis.raw.call(&["DEL", &redis.key(SHARD, lost)]).await;
        assert_eq!(applied().await, None, "{lost}");
    }
    // Batches do not hide it.
    for changes in [vec![waits(9, 5)], vec![forgotten(1), forgotten(2)]] {
        begin(&index, vec![ended(1, 5), ended(2, 5), ended(3, 5)]).await;
        redis.raw.call(&["DEL", &log_of(5)]).await;
        let refused = apply(&index, 10, 11, changes).await.unwrap_err();
        assert!(refused.starts_with("Gap { found: None"), "{refused}");
        assert_eq!(applied().await, None);
    }
    // Nor does one that forgets the jobs of the log before and of the lost one.
    begin(&index, vec![ended(1, 5), ended(2, 500_000), ended(3, 5)]).await;
    redis.raw.call(&["DEL", &log_of(500_000)]).await;
    apply(&index, 10, 11, vec![forgotten(1), forgotten(2)])
        .await
        .unwrap();
    assert_eq!(applied().await, None);
    redis.index.clear(SHARD, ME).await.unwrap();
    assert_eq!(redis.names(SHARD).await, ["meta"]);
    redis.remove().await;
}

#[tokio::test]
async fn redis_removes_expired_keys() {
    let redis = OwnRedis::connect().await;
    let index = redis.index.clone().with_max_ended(1);
    // The second one is of a slice that is over, as in a rebuild.
    begin(
        &index,
        vec![ended(1, 3_600_000), ended(2, -3_600_000), ended(3, 5)],
    )
    .await;
    let week = 7 * 86_400_000;
    for (forget, longest) in [(3_600_000, week + 3_600_000 + (1 << 18)), (-3_600_000, week)] {
        let log = redis.key(SHARD, &format!("evicted:{}", at(forget).as_millis() >> 18));
        let life = redis.raw.call(&["PTTL", &log]).await.as_i64().unwrap();
        assert!(
            (longest - (1 << 18) - 600_000..=longest).contains(&life),
            "{life}"
        );
    }
    begin(&redis.index, vec![with_key(waits(1, 5), b'a', 100_000)]).await;
    let key = |name: &str| redis.key(SHARD, name);
    let life = async |name: &str| redis.raw.call(&["PTTL", &key(name)]).await.as_i64().unwrap();
    // An expiry log covers keys of about four minutes, and the clock of Redis may differ.
    let longest = 100_000 + (1 << 18) + 60_000;
    let log = at(100_000).as_millis() >> 18;
    for name in [format!("idem:{}", "a".repeat(16)), format!("idemlog:18.{log}")] {
        let life = life(&name).await;
        assert!((130_000..=longest).contains(&life), "{name} lives for {life} ms");
    }
    redis.remove().await;
}

#[tokio::test]
async fn restarted_redis_is_used_again() {
    let mut local = LocalRedis::start().unwrap();
    let redis = OwnRedis::connect_to(&local.url()).await;
    begin(&redis.index, vec![waits(1, 5)]).await;
    local.kill_9();
    let reason = unavailable(apply_raw(&redis, 10).await).unwrap();
    assert!(!reason.is_empty());
    // A hundred concurrent calls fail without waiting for each other.
    let calls = (0..100).map(|_| redis.index.stats(SHARD, None, at(0), 1));
    let all_at_once = futures::future::join_all(calls);
    let answers = tokio::time::timeout(DEADLINE, all_at_once).await.unwrap();
    for answer in answers {
        unavailable(answer).unwrap();
    }
    unavailable(redis.index.ping().await).unwrap();

    local.start_again().unwrap();
    until_available(&redis).await;
    // Redis restarted empty.
    let gap = Err("Gap { found: None, expected: 10 }".to_owned());
    assert_eq!(apply(&redis.index, 10, 11, vec![waits(2, 5)]).await, gap);
    redis.index.clear(SHARD, ME).await.unwrap();
    apply(&redis.index, 0, 11, vec![waits(1, 5), waits(2, 5)])
        .await
        .unwrap();
    assert_eq!(all(&redis.index, 10).await, [(5, 1), (5, 2)]);
}

async fn apply_raw(redis: &OwnRedis, from: i64) -> Result<(), IndexError> {
    let batch = batch(from, from + 1, vec![waits(2, 5)]);
    redis.index.apply(SHARD, ME, &batch, at(0)).await
}

#[tokio::test]
async fn late_effects_are_gaps() {
    let local = LocalRedis::start().unwrap();
    let redis = OwnRedis::connect_to(&local.url()).await;
    begin(&redis.index, vec![waits(1, 5)]).await;
    local.process().stop();
    unavailable(apply_raw(&redis, 10).await).unwrap();
    unavailable(redis.index.clear(SHARD, ME).await).unwrap();
    local.process().cont();
    until_available(&redis).await;
    // Redis has executed both calls, which the caller does not know.
    let gap = Err("Gap { found: None, expected: 11 }".to_owned());
    assert_eq!(apply(&redis.index, 11, 12, vec![waits(3, 5)]).await, gap);
    redis.index.clear(SHARD, ME).await.unwrap();
    apply(&redis.index, 0, 12, vec![waits(1, 5)]).await.unwrap();
    assert_eq!(all(&redis.index, 10).await, [(5, 1)]);
}

#[tokio::test]
async fn silent_connection_is_replaced() {
    let proxy = Proxy::to(&redis_url()).await;
    let config = config(&proxy.url());
    let (index, _tasks) = connect(&config).await.unwrap();
    begin(&index, vec![waits(1, 5)]).await;
    proxy.silence();
    // More than fits into the buffers of the system, so that the client blocks while writing.
    let long = Effect::Waits {
        flow: flow_of(2),
        due: at(5),
        record: vec![0; 1 << 20].into(),
        key: None,
    };
    let long = batch(10, 11, vec![Change::of_job(id(2), long)]);
    let calls = (0..30).map(|_| index.apply(SHARD, ME, &long, at(0)));
    for answer in futures::future::join_all(calls).await {
        unavailable(answer).unwrap();
    }
    eventually_async("the index answers", DEADLINE, async || index.ping().await).await;
    assert_eq!(apply(&index, 10, 11, vec![waits(2, 5)]).await, Ok(()));
    assert_eq!(all(&index, 10).await, [(5, 1), (5, 2)]);
    index.clear(SHARD, ME).await.unwrap();
}

#[tokio::test]
async fn evicting_redis_is_refused() {
    let local = LocalRedis::start().unwrap();
    let raw = Raw::connect(&local.url()).await;
    raw.call(&["CONFIG", "SET", "maxmemory", "100mb"]).await;
    raw.call(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"])
        .await;
    let error = connect(&config(&local.url())).await.unwrap_err();
    assert!(matches!(error, ConnectError::Evicts(_)), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("`allkeys-lru`") && text.contains("CONFIG SET maxmemory-policy noeviction"),
        "{text}"
    );
    raw.call(&["CONFIG", "SET", "maxmemory-policy", "noeviction"])
        .await;
    let redis = OwnRedis::connect_to(&local.url()).await;
    begin(&redis.index, vec![]).await;

    // After a lost connection, it may be another server.
    raw.call(&["CONFIG", "SET", "maxmemory-policy", "volatile-ttl"])
        .await;
    raw.call(&["CLIENT", "KILL", "TYPE", "normal"]).await;
    eventually_async("the index refuses it", DEADLINE, async || {
        let reason = unavailable(redis.index.ping().await)?;
        reason
            .contains("CONFIG SET maxmemory-policy noeviction")
            .then_some(())
            .ok_or(reason)
    })
    .await;
    unavailable(apply_raw(&redis, 10).await).unwrap();
    raw.call(&["CONFIG", "SET", "maxmemory-policy", "noeviction"])
        .await;
    until_available(&redis).await;
    apply_raw(&redis, 10).await.unwrap();
}

#[tokio::test]
async fn full_redis_rejects_unforced_batches() {
    let local = LocalRedis::start().unwrap();
    let redis = OwnRedis::connect_to(&local.url()).await;
    begin(&redis.index, vec![waits(1, 5), waits(2, 5)]).await;
    redis
        .raw
        .call(&["CONFIG", "SET", "maxmemory-policy", "noeviction"])
        .await;
    redis.raw.call(&["CONFIG", "SET", "maxmemory", "1"]).await;
    let before = dump(&redis, redis.prefix()).await;
    for change in [
        waits(2, 5),
        ended(1, 9),
        waits_in(&flow("new"), 3, 5),
        forgotten(1),
    ] {
        let refused = redis
            .index
            .apply(SHARD, ME, &batch(10, 11, vec![change]), at(0))
            .await;
        assert!(
            matches!(&refused, Err(IndexError::Full(reason)) if reason.starts_with("OOM")),
            "{refused:?}"
        );
    }
    // The batches had no effect.
    assert_eq!(dump(&redis, redis.prefix()).await, before);
    let ahead = due_scan(&redis.index, None, at(5), 10, 1000).await.unwrap();
    assert_eq!((ahead.applied.unwrap().offset, ahead.rows.len()), (10, 2));
    let renewal = Batch::renewal(10);
    let refused = redis.index.apply(SHARD, ME, &renewal, at(0)).await;
    assert!(matches!(&refused, Err(IndexError::Full(_))), "{refused:?}");
    // A take-over applies an empty batch by force. It must not wait for memory.
    let forced = Batch {
        force: true,
        ..renewal
    };
    redis.index.apply(SHARD, ME, &forced, at(0)).await.unwrap();
    let forced = Batch {
        force: true,
        ..batch(
            10,
            11,
            vec![ended(1, 9), forgotten(2), waits_in(&flow("new"), 3, 5)],
        )
    };
    redis.index.apply(SHARD, ME, &forced, at(0)).await.unwrap();
    redis.index.claim(SHARD, ME).await.unwrap();
    assert_eq!(all(&redis.index, 10).await, [(5, 3)]);
    redis.index.clear(SHARD, ME).await.unwrap();
    redis.raw.call(&["CONFIG", "SET", "maxmemory", "0"]).await;
    apply(&redis.index, 10, 11, vec![waits(1, 5)]).await.unwrap();
}

#[tokio::test]
async fn memory_pressure_is_reported() {
    let local = LocalRedis::start().unwrap();
    let redis = OwnRedis::connect_to(&local.url()).await;
    let until = async |room: MemoryPressure| {
        let what = format!("room is {room:?}");
        eventually_async(&what, DEADLINE, async || match redis.index.usage() {
            usage if usage.pressure == room => Ok(usage.share),
            usage => Err(format!("{usage:?}")),
        })
        .await
    };
    assert_eq!(until(MemoryPressure::Low).await, None, "there is no limit");
    let info = redis.raw.call(&["INFO", "memory"]).await.into_string().unwrap();
    let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
    let used: u64 = used.unwrap().trim().parse().unwrap();
    let limit = |memory: u64| memory.to_string();
    redis
        .raw
        .call(&["CONFIG", "SET", "maxmemory", &limit(used * 100 / 95)])
        .await;
    assert!(
        until(MemoryPressure::High)
            .await
            .is_some_and(|share| (0.9..1.0).contains(&share))
    );
    redis
        .raw
        .call(&["CONFIG", "SET", "maxmemory", &limit(used / 2)])
        .await;
    assert!(until(MemoryPressure::Full).await.is_some_and(|share| share > 1.0));
    redis
        .raw
        .call(&["CONFIG", "SET", "maxmemory", &limit(used * 2)])
        .await;
    assert!(until(MemoryPressure::Low).await.is_some_and(|share| share < 0.9));
}

#[tokio::test]
async fn replica_is_reported() {
    let local = LocalRedis::start().unwrap();
    let redis = OwnRedis::connect_to(&local.url()).await;
    begin(&redis.index, vec![]).await;
    let unused = redeliver_testkit::free_port().to_string();
    redis.raw.call(&["REPLICAOF", "127.0.0.1", &unused]).await;
    let reason = unavailable(apply_raw(&redis, 10).await).unwrap();
    assert!(reason.starts_with("READONLY"), "{reason}");
    redis.raw.call(&["REPLICAOF", "NO", "ONE"]).await;
    until_available(&redis).await;
    apply_raw(&redis, 10).await.unwrap();
}

#[tokio::test]
async fn restricted_user_can_connect() {
    let local = LocalRedis::start().unwrap();
    let raw = Raw::connect(&local.url()).await;
    let rights = ["on", ">pw", "~*", "+@all", "-config", "-info"];
    let mut command = vec![Value::from("ACL"), "SETUSER".into(), "jobs".into()];
    command.extend(rights.map(Value::from));
    raw.call_with(command).await;
    let url = local.url().replace("redis://", "redis://jobs:pw@");
    let (index, _tasks) = connect(&config(&url)).await.unwrap();
    begin(&index, vec![with_key(waits(1, 5), 1, 1000)]).await;
    let (_, found) = index.look_up(SHARD, &[Lookup::Job(id(1))], at(0)).await.unwrap();
    assert!(found[0].is_some());
}
