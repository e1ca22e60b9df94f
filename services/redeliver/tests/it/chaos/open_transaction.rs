//! A process crashes within a transaction and does not come back, so the transaction stays open until it times out. Only the
//! partitions in it may wait for that.
//!
//! Meanwhile the transaction also hides later records of its output partition from read_committed consumers. So progress is
//! measured by what the other process has committed.

use std::collections::BTreeSet;

use redeliver_kafka::murmur2::partition_for_key;
use redeliver_testkit::{ChaosPermit, Fate, ServiceProcess, eventually, until_shared};

use super::{PARTITIONS, SESSION};
use crate::support::{DEADLINE, Draft, Pipe, PipeBuilder, Sent};

const LEFT_OPEN: &str = "in the open transaction";
/// Records that are sent one after the other. A lane that waited for an unanswered request of a second in each round would
/// not finish them before the transaction times out.
const IN_SEQUENCE: usize = 100;
/// Records that are sent together.
const AT_ONCE: usize = 1_000;

/// A key whose records go to this partition.
fn key_of(partition: i32) -> String {
    let count = i32::try_from(PARTITIONS).unwrap();
    (0..)
        .map(|n| format!("key-{n}"))
        .find(|key| partition_for_key(key.as_bytes(), count) == partition)
        .unwrap()
}

fn record(partition: i32, value: impl Into<String>) -> Draft {
    Draft::new(key_of(partition), value.into())
}

/// The partitions of the source that a process reads.
fn source_partitions(pipe: &Pipe, process: &mut ServiceProcess) -> BTreeSet<i32> {
    let (_, metrics) = process.get("/metrics");
    let count = i32::try_from(PARTITIONS).unwrap();
    let reads = |partition: &i32| {
        let topic = format!("topic=\"{}\"", pipe.pipeline.source);
        let partition = format!("partition=\"{partition}\"");
        metrics.lines().any(|line| {
            line.starts_with("redeliver_lane_lag{") && line.contains(&topic) && line.contains(&partition)
        })
    };
    (0..count).filter(reads).collect()
}

/// The number of records that a process has committed.
fn committed(process: &mut ServiceProcess) -> u64 {
    process.metric("redeliver_lane_completed_total")
}

/// The records that the pipeline has received, and the process that completes them.
struct Progress<'a> {
    pipe: &'a Pipe,
    process: &'a mut ServiceProcess,
    sent: Vec<Sent>,
}

impl Progress<'_> {
    /// Sends these records together and waits until the process has committed them.
    #[track_caller]
    fn complete(&mut self, drafts: Vec<Draft>) {
        let expected = committed(self.process) + drafts.len() as u64;
        self.sent.extend(self.pipe.produce(drafts));
        let condition = format!("{} has committed them", self.process.name());
        eventually(&condition, DEADLINE, || match committed(self.process) {
            count if count >= expected => Ok(()),
            count => Err(format!("{count} of {expected}")),
        });
    }

    /// Sends records to these partitions in turn, each after the one before was committed.
    #[track_caller]
    fn complete_in_sequence(&mut self, partitions: &BTreeSet<i32>, name: &str) {
        for (n, partition) in partitions.iter().cycle().take(IN_SEQUENCE).enumerate() {
            self.complete(vec![record(*partition, format!("{name} {n}"))]);
        }
    }
}

#[test]
#[ignore = "long"]
fn open_transaction_stops_only_its_partition() {
    let _permit = ChaosPermit::acquire();
    let pipe = PipeBuilder::new("chaos-open")
        .partitions(PARTITIONS)
        .tiers(&[1_000])
        // There is no due topic then, so that both processes own partitions of the source.
        .pipeline("return_to", "source")
        .set("kafka.static_membership", "true")
        .set("kafka.session_timeout", &format!("{}s", SESSION.as_secs()))
        .set("kafka.transaction_timeout", "60s")
        .create();
    let all: BTreeSet<i32> = (0..i32::try_from(PARTITIONS).unwrap()).collect();
    let mut staying = pipe.enricher("b");
    let mut progress = Progress {
        pipe: &pipe,
        process: &mut staying,
        sent: Vec::new(),
    };
    // Then every partition has a committed position, and no first commit is in the transaction by chance.
    progress.complete(
        all.iter()
            .map(|partition| record(*partition, format!("first {partition}")))
            .collect(),
    );
    let mut sent = progress.sent;

    let env = pipe.env.clone();
    let instance = format!("instance={}-a", pipe.name());
    let crashing = ServiceProcess::spawn("enricher a", move || {
        let mut command = env.command("enricher", &["--set", &instance]);
        // After the outputs and the offsets of its first transaction, before its end.
        command.env("REDELIVER_FAULT", "offsets:1");
        command
    });
    let mut pair = [crashing, staying];
    until_shared(&mut pair, PARTITIONS.into());
    let [mut crashing, mut staying] = pair;
    let (left_open, own) = eventually("both processes read the source", DEADLINE, || {
        let [dying, staying] = [&mut crashing, &mut staying].map(|process| source_partitions(&pipe, process));
        let are_distinct = dying.is_disjoint(&staying) && dying.len() + staying.len() == all.len();
        match dying.first() {
            Some(partition) if are_distinct && dying.len() > 1 && !staying.is_empty() => {
                Ok((*partition, staying))
            }
            _ => Err(format!("{dying:?} and {staying:?}")),
        }
    });

    sent.extend(pipe.produce(vec![record(left_open, LEFT_OPEN)]));
    crashing.until_crashed();
    let output = crashing.output();
    assert!(
        output.contains("fault injected: aborting name=\"offsets\" count=1"),
        "{output}"
    );
    let mut progress = Progress {
        pipe: &pipe,
        process: &mut staying,
        sent,
    };
    progress.complete_in_sequence(&own, "own");
    progress.process.until_owning(PARTITIONS.into());
    let others: BTreeSet<i32> = all
        .iter()
        .copied()
        .filter(|partition| *partition != left_open)
        .collect();
    progress.complete_in_sequence(&others, "taken over");
    let burst = others.iter().cycle().take(AT_ONCE).enumerate();
    progress.complete(
        burst
            .map(|(n, partition)| record(*partition, format!("burst {n}")))
            .collect(),
    );
    // The record is called again once the transaction is aborted, and not before.
    assert_eq!(pipe.endpoint.calls_of_body(LEFT_OPEN.as_bytes()), 1);

    let sent = progress.sent;
    let ends = pipe.settle(&sent, DEADLINE);
    ends.meets_with(&sent, |_| Fate::Succeeds);
    println!("{}", ends.report);
    assert_eq!(pipe.endpoint.calls_of_body(LEFT_OPEN.as_bytes()), 2);
    assert_eq!(
        pipe.endpoint.calls(),
        sent.len() as u64 + 1,
        "only the call of the dead process is repeated"
    );
    assert!(staying.has_never_ended() && crashing.crashes() == 1);
}
