//! A redrive while each of three brokers is killed in turn, and the inspectors that execute it are killed and frozen, and while it is paused, resumed
//! and given another rate.

use std::collections::BTreeMap;
use std::time::Duration;

use redeliver_core::Headers;
use redeliver_kafka::reader::TopicReader;
use redeliver_proto::{Message as _, v1};
use redeliver_testkit::{
    LocalKafka, chaos_with_permit, ensure, eventually, eventually_async, sleep_up_to, until_in_sync,
};
use tonic::Status;

use crate::redrive::{
    ENDED, World, change, client, get, ids_at, outcomes, plan, planned_of, read, start, until,
};
use crate::support::{DEADLINE, Inspector};

const REPLICAS: usize = 3;
const COUNT: i64 = 50_000;
/// So slow that the redrive takes longer than everything that is killed.
const RATE: u32 = 200;
/// Each kills or freezes the inspector that redrives.
const ROUNDS: usize = 12;
/// The rounds in which it is frozen.
const FREEZES: [usize; 2] = [4, 9];
/// The rounds in which a broker is killed, too.
const BROKERS: [usize; REPLICAS] = [2, 6, 10];
const PAUSE: usize = 3;
const OTHER_RATE: usize = 7;
const CANCEL: usize = 8;
/// Dead letters of a second job, one per second, which is cancelled before its end.
const CANCELLED: i64 = 2_000;

/// A job and its observed states.
struct Watched {
    id: String,
    total: u32,
    /// The number of items done, by inspector.
    done: [u32; 2],
    reader: TopicReader,
    /// How often each origin is in the due topic.
    times: BTreeMap<Vec<u8>, u32>,
}

impl Watched {
    /// Checks what an inspector says of the job: its counters add up, and nothing that was done is taken back.
    async fn look(&mut self, inspectors: &mut [Inspector; 2], index: usize) -> Result<v1::Redrive, Status> {
        let job = get(&mut inspectors[index], &self.id).await?;
        let sum = job.done + job.failed + job.skipped + job.pending;
        assert_eq!((sum, job.failed, job.skipped), (self.total, 0, 0), "{job:?}");
        assert!(
            job.done >= self.done[index],
            "{} before: {job:?}",
            self.done[index]
        );
        self.done[index] = job.done;
        Ok(job)
    }

    /// Waits until more is redriven, and looks at these inspectors all the time.
    async fn until_more(&mut self, inspectors: &mut [Inspector; 2], serving: &[usize], count: usize) {
        let wanted = self.times.len() + count;
        eventually_async(&format!("{wanted} are redriven"), DEADLINE, async || {
            for index in serving {
                self.look(inspectors, *index)
                    .await
                    .map_err(|status| status.to_string())?;
            }
            // Fails while a broker is away.
            self.read()?;
            let seen = self.times.len();
            ensure(seen >= wanted, seen.to_string())
        })
        .await;
    }

    fn read(&mut self) -> Result<(), String> {
        let times = &mut self.times;
        let reading = self.reader.read_to_end(Duration::from_secs(20), |record| {
            let origin = record.headers.last("original-offset").unwrap().to_vec();
            *times.entry(origin).or_default() += 1;
        });
        reading.map_err(|error| error.to_string())
    }

    /// Waits until the job is as expected, after a change.
    async fn until(
        &mut self,
        inspectors: &mut [Inspector; 2],
        index: usize,
        is_expected: impl Fn(&v1::Redrive) -> bool,
    ) {
        eventually_async("the job is changed", DEADLINE, async || {
            let job = self.look(inspectors, index).await;
            let job = job.map_err(|status| status.to_string())?;
            ensure(is_expected(&job), format!("{job:?}"))
        })
        .await;
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

/// Repeats a call while brokers are away.
async fn repeated<T>(what: &str, mut call: impl AsyncFnMut() -> Result<T, Status>) -> T {
    eventually_async(what, DEADLINE, async || {
        call().await.map_err(|status| status.to_string())
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "long"]
async fn each_is_redriven_once_through_outages() {
    let (_permit, mut random) = chaos_with_permit("redrive-brokers");
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
    let with_rate = |request, rate| v1::PlanRedriveRequest {
        rate_per_second: rate,
        ..request
    };
    let request = with_rate(plan(v1::RedriveKind::Redrive, ""), RATE);
    let job = planned_of(&mut inspectors[0], &request, total).await;
    let more = (COUNT..COUNT + CANCELLED).map(|offset| world.dead(offset, None, Headers::new()));
    world.env.put(&world.dlq, 0, more.collect()).await;
    let request = with_rate(ids_at(&world, 0, COUNT / 2..COUNT / 2 + CANCELLED), 1);
    let second = planned_of(&mut inspectors[0], &request, u32::try_from(CANCELLED).unwrap()).await;
    start(&mut inspectors[0], &job.id).await;
    start(&mut inspectors[0], &second.id).await;
    let mut watched = Watched {
        id: job.id.clone(),
        total,
        done: [0; 2],
        reader: TopicReader::new(&world.env.kafka, std::slice::from_ref(&world.due)).unwrap(),
        times: BTreeMap::new(),
    };
    for round in 0..ROUNDS {
        watched.until_more(&mut inspectors, &[0, 1], 200).await;
        let victim = executing(&mut inspectors);
        let other = 1 - victim;
        let broker = BROKERS.iter().position(|killed| *killed == round);
        if let Some(broker) = broker {
            until_in_sync(&brokers[broker], REPLICAS, u32::try_from(broker).unwrap() + 1);
            brokers[broker].kill_9();
        }
        if round == PAUSE {
            let paused = client(&mut inspectors[other])
                .await
                .pause_redrive(change(&job.id))
                .await;
            paused.unwrap();
            watched
                .until(&mut inspectors, victim, |job| {
                    job.state() == v1::RedriveState::Paused
                })
                .await;
        }
        sleep_up_to(&mut random, Duration::from_millis(1_000));
        let seen = repeated("the job", async || watched.look(&mut inspectors, other).await).await;
        assert!(
            seen.pending > 0,
            "the job ended before it was disturbed: {seen:?}"
        );
        let is_frozen = FREEZES.contains(&round);
        if is_frozen {
            inspectors[victim].process.freeze();
        } else {
            inspectors[victim].process.kill_9();
        }
        if round == PAUSE {
            repeated("the job is resumed", async || {
                let mut client = client(&mut inspectors[other]).await;
                client.resume_redrive(change(&job.id)).await
            })
            .await;
        }
        if round == OTHER_RATE {
            let rate = v1::SetRedriveRateRequest {
                id: job.id.clone(),
                rate_per_second: RATE / 2,
                expected_revision: None,
            };
            repeated("the rate is set", async || {
                client(&mut inspectors[other])
                    .await
                    .set_redrive_rate(rate.clone())
                    .await
            })
            .await;
            watched
                .until(&mut inspectors, other, |job| job.rate_per_second == RATE / 2)
                .await;
        }
        if round == CANCEL {
            repeated("the second job is cancelled", async || {
                let mut client = client(&mut inspectors[other]).await;
                client.cancel_redrive(change(&second.id)).await
            })
            .await;
        }
        // The other one takes over, with the brokers that are left.
        watched.until_more(&mut inspectors, &[other], 200).await;
        if is_frozen {
            inspectors[victim].process.thaw();
        } else {
            inspectors[victim].process.start_again();
        }
        if let Some(broker) = broker {
            brokers[broker].start_again().unwrap();
        }
        inspectors[victim].until_serving().await;
    }
    until_in_sync(&brokers[0], REPLICAS, 3);
    repeated("the rate is unlimited", async || {
        let rate = v1::SetRedriveRateRequest {
            id: job.id.clone(),
            ..v1::SetRedriveRateRequest::default()
        };
        client(&mut inspectors[0]).await.set_redrive_rate(rate).await
    })
    .await;
    let ended = until(&mut inspectors[0], &job.id, &ENDED).await;
    assert_eq!(
        (ended.state(), ended.done, ended.pending),
        (v1::RedriveState::Succeeded, total, 0),
        "{ended:?}"
    );
    let cancelled = get(&mut inspectors[0], &second.id).await.unwrap();
    assert_eq!(cancelled.state(), v1::RedriveState::Cancelled);
    eventually("all are read", DEADLINE, || watched.read());
    let not_once = watched.times.iter().filter(|(_, times)| **times != 1);
    let not_once: Vec<_> = not_once.take(5).collect();
    assert!(not_once.is_empty(), "{not_once:?}");
    assert_eq!(watched.times.len(), (total + cancelled.done) as usize);
    let expected = vec![v1::RedriveOutcome::Done; usize::try_from(COUNT).unwrap()];
    assert_eq!(outcomes(&mut inspectors[0], &job.id).await, expected);

    // The ledger and the audit log say the same.
    let ledger = read(&world.env, &redeliver_dlq_inspector::ledger::TOPIC.into());
    let mut entries: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    for record in &ledger {
        let entry = v1::LedgerEntry::decode(record.value.clone().unwrap()).unwrap();
        assert_eq!(entry.state(), v1::DeadLetterState::Redriven);
        if entry.redrive_id == cancelled.id {
            continue;
        }
        assert_eq!(entry.redrive_id, job.id);
        *entries.entry(record.key.clone().unwrap().to_vec()).or_default() += 1;
    }
    assert!(entries.values().all(|times| *times == 1));
    assert_eq!(entries.len(), usize::try_from(COUNT).unwrap());
    let audit = read(&world.env, &format!("{}-audit", world.env.base.name()).into());
    let audited: u64 = audit
        .iter()
        .map(|record| v1::AuditEntry::decode(record.value.clone().unwrap()).unwrap())
        .filter(|entry| entry.action == "dead-letters.redrive" && entry.target == job.id)
        .map(|entry| entry.count)
        .sum();
    assert_eq!(audited, u64::from(total));
}
