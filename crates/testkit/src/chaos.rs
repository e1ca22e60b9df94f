//! What chaos tests share: a limit on how many run at a time, load that lasts as long as the chaos, and
//! conditions to wait for.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::local_kafka::kafka_tool;
use crate::target::target_directory;
use crate::{DEADLINE, LocalKafka, ServiceProcess, chaos_random, ensure, eventually};

/// Sleeps for a random time.
pub fn sleep_up_to(random: &mut fastrand::Rng, longest: Duration) {
    thread::sleep(longest.mul_f64(random.f64()));
}

/// Permission to run a chaos test, until it is dropped. Only two tests with this target directory have it at a time, because a
/// process that gets no CPU time looks like a dead one.
pub struct ChaosPermit {
    _locked: File,
}

impl ChaosPermit {
    /// Waits for permission.
    ///
    /// # Panics
    /// If the target directory cannot be written.
    #[must_use]
    pub fn acquire() -> Self {
        let directory = target_directory()
            .expect("finding the target directory")
            .join("testkit");
        std::fs::create_dir_all(&directory).expect("making a directory");
        loop {
            // One thread cannot wait for two locks.
            for number in [0, 1] {
                let file =
                    File::create(directory.join(format!("chaos-{number}.lock"))).expect("making a lock");
                if file.try_lock().is_ok() {
                    return Self { _locked: file };
                }
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Waits for permission to run a chaos test, and returns it with the random choices of the test; see [`chaos_random`].
///
/// # Panics
/// If the target directory cannot be written, or the seed is not a number.
#[must_use]
#[track_caller]
pub fn chaos_with_permit(test: &str) -> (ChaosPermit, fastrand::Rng) {
    (ChaosPermit::acquire(), chaos_random(test))
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Runs `load` in a thread while `chaos` runs, and returns what it returns. `load` ends soon after the flag that it is
/// given is set.
///
/// # Panics
/// If one of both panics.
pub fn under_load<T: Send>(load: impl FnOnce(&AtomicBool) -> T + Send, chaos: impl FnOnce()) -> T {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let load = scope.spawn(|| load(&is_over));
        {
            // Set even if the chaos panics: otherwise the scope would wait for the load forever.
            let _over = SetOnDrop(&is_over);
            chaos();
        }
        load.join().expect("the load does not panic")
    })
}

/// Waits until both processes own partitions, together `partitions`.
#[track_caller]
pub fn until_shared(pair: &mut [ServiceProcess; 2], partitions: u64) {
    let condition = format!("{} and {} own partitions", pair[0].name(), pair[1].name());
    eventually(&condition, DEADLINE, || {
        let owned = pair.each_mut().map(ServiceProcess::owned);
        let holds = owned.iter().all(|owned| *owned > 0) && owned.iter().sum::<u64>() == partitions;
        ensure(holds, format!("{owned:?} of {partitions}"))
    });
}

/// Waits until broker 2 leads partitions, as Kafka's own tool sees it.
///
/// # Panics
/// If it does not within a minute, or the tool cannot be run.
#[track_caller]
pub fn until_second_broker_leads(first: &LocalKafka) {
    eventually("the second broker leads partitions", DEADLINE, || {
        let mut tool = kafka_tool("org.apache.kafka.tools.TopicCommand").expect("finding the tool");
        tool.args(["--bootstrap-server", &first.brokers(), "--describe"]);
        let output = tool.output().expect("running the tool");
        let described = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure(described.contains("Leader: 2"), described)
    });
}

/// Waits until all partitions have this many replicas in sync and this broker leads some of them, as Kafka's own tool sees
/// it. Until then, killing the broker could make partitions unavailable, or would hit no leader.
///
/// # Panics
/// If that takes too long, or the tool cannot be run.
#[track_caller]
pub fn until_in_sync(any: &LocalKafka, replicas: usize, leader: u32) {
    let condition = format!("all replicas are in sync, and broker {leader} leads partitions");
    eventually(&condition, DEADLINE, || {
        let mut tool = kafka_tool("org.apache.kafka.tools.TopicCommand").expect("finding the tool");
        tool.args(["--bootstrap-server", &any.brokers(), "--describe"]);
        let output = tool.output().expect("running the tool");
        let described = String::from_utf8_lossy(&output.stdout).into_owned();
        match check_replicas(&described, replicas, leader) {
            Ok(()) => Ok(()),
            Err(problem) => Err(format!("{problem}\n{}", String::from_utf8_lossy(&output.stderr))),
        }
    });
}

/// Checks the lines about partitions, such as `Topic: a  Partition: 0  Leader: 1  Replicas: 1,2  Isr: 2,1  Elr:`.
fn check_replicas(described: &str, replicas: usize, leader: u32) -> Result<(), String> {
    let value = |line: &str, name: &str| -> Option<String> {
        let mut words = line.split_whitespace().skip_while(|word| *word != name);
        words.nth(1).map(str::to_owned)
    };
    let mut leads = false;
    for line in described.lines() {
        let Some(isr) = value(line, "Isr:") else {
            continue;
        };
        if isr.split(',').count() < replicas {
            return Err(line.to_owned());
        }
        leads |= value(line, "Leader:") == Some(leader.to_string());
    }
    ensure(leads, format!("broker {leader} leads no partition:\n{described}"))
}

#[cfg(test)]
mod tests {
    use super::check_replicas;

    #[test]
    fn missing_replicas_are_found() {
        let described = "Topic: a\tTopicId: x\tPartitionCount: 2\tReplicationFactor: 3\tConfigs: min.insync.replicas=2\n\
            \tTopic: a\tPartition: 0\tLeader: 1\tReplicas: 1,2,3\tIsr: 3,2,1\tElr: \tLastKnownElr: \n\
            \tTopic: a\tPartition: 1\tLeader: 2\tReplicas: 2,3,1\tIsr: 2,3\tElr: \tLastKnownElr: \n";
        assert_eq!(check_replicas(described, 2, 2), Ok(()));
        assert!(
            check_replicas(described, 3, 2)
                .unwrap_err()
                .contains("Partition: 1")
        );
        assert!(check_replicas(described, 2, 3).unwrap_err().contains("leads no"));
        assert!(check_replicas("", 3, 1).is_err());
    }
}
