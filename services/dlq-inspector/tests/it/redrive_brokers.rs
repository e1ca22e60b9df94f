//! A redrive while each of three brokers is killed in turn, and the inspectors that execute it are killed and frozen.

use std::collections::BTreeMap;
use std::time::Duration;

use redeliver_kafka::reader::TopicReader;
use redeliver_proto::{Message as _, v1};
use redeliver_testkit::{
    ChaosPermit, LocalKafka, chaos_random, eventually, eventually_async, sleep_up_to, until_in_sync,
};

use crate::redrive::{ENDED, World, outcomes, plan, planned, read, start, until};
use crate::support::{DEADLINE, Inspector};

const REPLICAS: usize = 3;
const COUNT: i64 = 20_000;
/// So slow that the redrive takes longer than everything that is killed.
const RATE: u32 = 200;

/// How often each origin is in the due topic.
struct Redriven {
    reader: TopicReader,
    times: BTreeMap<Vec<u8>, u32>,
}

impl Redriven {
    fn until_more(&mut self, count: usize) {
        let wanted = self.times.len() + count;
        eventually(&format!("{wanted} are redriven"), DEADLINE, || {
            // Fails while a broker is away.
            self.read()?;
            let seen = self.times.len();
            if seen >= wanted {
                Ok(())
            } else {
                Err(seen.to_string())
            }
        });
    }

    fn read(&mut self) -> Result<(), String> {
        let times = &mut self.times;
        let reading = self.reader.read_to_end(Duration::from_secs(20), |record| {
            let origin = record.headers.last("original-offset").unwrap().to_vec();
            *times.entry(origin).or_default() += 1;
        });
        reading.map_err(|error| error.to_string())
    }
}

/// What an inspector has redriven since its start.
const DONE: &str = "redeliver_dlq_redrive_items_total{kind=\"redrive\",outcome=\"done\"}";

/// The index of the inspector that redrives.
fn executing(inspectors: &mut [Inspector; 2]) -> usize {
    let mut before = [u64::MAX; 2];
    eventually("an inspector redrives", DEADLINE, || {
        let done = inspectors
            .each_mut()
            .map(|inspector| inspector.process.metric(DONE));
        let has_more = [0, 1].into_iter().find(|index| done[*index] > before[*index]);
        before = done;
        has_more.ok_or_else(|| format!("{done:?}"))
    })
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn each_of_20000_dead_letters_is_redriven_once_while_brokers_and_inspectors_are_killed_and_frozen() {
    let _permit = ChaosPermit::acquire();
    let mut random = chaos_random("redrive-brokers");
    let mut brokers = LocalKafka::start_three().unwrap();
    let addresses = brokers.each_ref().map(LocalKafka::brokers).join(",");
    let mut world = World::on("redrive-brokers", "", &addresses).await;
    for (key, value) in [
        ("kafka.topics.replication", "3"),
        ("kafka.transaction_timeout", "5s"),
        ("kafka.session_timeout", "6s"),
    ] {
        world.env.base.set(key, value);
    }
    world.put(COUNT).await;
    world.env.use_data_dir("a");
    let first = world.env.spawn();
    world.env.use_data_dir("b");
    let mut inspectors = [first, world.env.spawn()];
    for inspector in &mut inspectors {
        inspector.until_serving().await;
    }
    let total = u32::try_from(COUNT).unwrap();
    let job = eventually_async("the plan", DEADLINE, async || {
        let request = v1::PlanRedriveRequest {
            rate_per_second: RATE,
            ..plan(v1::RedriveKind::Redrive, "")
        };
        let job = planned(&mut inspectors[0], request).await;
        let job = job.map_err(|status| status.to_string())?;
        if job.total == total {
            Ok(job)
        } else {
            Err(job.total.to_string())
        }
    })
    .await;
    start(&mut inspectors[0], &job.id).await;
    let mut redriven = Redriven {
        reader: TopicReader::new(&world.env.kafka, std::slice::from_ref(&world.due)).unwrap(),
        times: BTreeMap::new(),
    };
    for (id, broker) in (1..).zip(&mut brokers) {
        until_in_sync(broker, REPLICAS, id);
        for inspector in &mut inspectors {
            inspector.until_serving().await;
        }
        redriven.until_more(300);
        let victim = executing(&mut inspectors);
        sleep_up_to(&mut random, Duration::from_millis(1_000));
        broker.kill_9();
        sleep_up_to(&mut random, Duration::from_millis(1_000));
        if id == 2 {
            // It wakes up once the other one has taken over.
            let before = inspectors[1 - victim].process.metric(DONE);
            inspectors[victim].process.freeze();
            let other = &mut inspectors[1 - victim].process;
            eventually("the other one redrives", DEADLINE, || {
                let done = other.metric(DONE);
                if done > before {
                    Ok(())
                } else {
                    Err(done.to_string())
                }
            });
            inspectors[victim].process.thaw();
        } else {
            inspectors[victim].process.kill_9();
            inspectors[victim].process.start_again();
        }
        // More is redriven only if the other two brokers and an inspector do their work.
        redriven.until_more(600);
        broker.start_again().unwrap();
    }
    until_in_sync(&brokers[0], REPLICAS, 3);
    for inspector in &mut inspectors {
        inspector.until_serving().await;
    }
    let ended = until(&mut inspectors[0], &job.id, &ENDED).await;
    assert_eq!(
        (
            ended.state(),
            ended.done,
            ended.failed,
            ended.skipped,
            ended.pending
        ),
        (v1::RedriveState::Succeeded, total, 0, 0, 0),
        "{ended:?}"
    );
    eventually("all are read", DEADLINE, || redriven.read());
    let not_once = redriven.times.iter().filter(|(_, times)| **times != 1);
    let not_once: Vec<_> = not_once.take(5).collect();
    assert!(not_once.is_empty(), "{not_once:?}");
    assert_eq!(redriven.times.len(), usize::try_from(COUNT).unwrap());
    let expected = vec![v1::RedriveOutcome::Done; usize::try_from(COUNT).unwrap()];
    assert_eq!(outcomes(&mut inspectors[0], &job.id).await, expected);

    // The ledger and the audit log say the same.
    let ledger = read(&world.env, &redeliver_dlq_inspector::ledger::TOPIC.into());
    let mut entries: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    for record in &ledger {
        let entry = v1::LedgerEntry::decode(record.value.clone().unwrap()).unwrap();
        assert_eq!(
            (entry.state(), &entry.redrive_id),
            (v1::DeadLetterState::Redriven, &job.id)
        );
        *entries.entry(record.key.clone().unwrap().to_vec()).or_default() += 1;
    }
    assert!(entries.values().all(|times| *times == 1));
    assert_eq!(entries.len(), usize::try_from(COUNT).unwrap());
    let audit = read(&world.env, &format!("{}-audit", world.env.base.name()).into());
    let audited: u64 = audit
        .iter()
        .map(|record| v1::AuditEntry::decode(record.value.clone().unwrap()).unwrap())
        .filter(|entry| entry.action == "dead-letters.redrive")
        .map(|entry| entry.count)
        .sum();
    assert_eq!(audited, u64::from(total));
}
