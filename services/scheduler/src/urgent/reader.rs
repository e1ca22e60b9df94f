//! The thread that reads the urgent topic.
//!
//! No partition waits for another one: questions to brokers are asked in other threads, and of a partition whose copies cannot be passed
//! on, no more are read.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use redeliver_core::Clock;
use redeliver_core::wait::{Backoff, LogThrottle};
use redeliver_kafka::follow::{Ends, Event, Follower, Start};
use redeliver_kafka::reader::ReadError;
use redeliver_kafka::{KafkaSettings, Waker};
use redeliver_runtime::error_chain::error_chain;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::copy::read_copy;
use super::inbox::UrgentCopies;
use super::partition::{Partition, Question};
use crate::metrics::UrgentMetrics;
use crate::settings::Settings;

/// The maximum time until the reader notices a new shard, or the end of the process, and between two attempts to pass copies on.
const POLL: Duration = Duration::from_millis(200);
/// The maximum number of questions at the same time, and how many of them may concern partitions whose last question was not answered.
const MAX_QUESTIONS: usize = 16;
const MAX_REPEATED_QUESTIONS: usize = 8;

/// The thread that reads the urgent topic.
pub(crate) struct Reader {
    pub(crate) kafka: KafkaSettings,
    pub(crate) settings: Arc<Settings>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) copies: Arc<UrgentCopies>,
    pub(crate) metrics: UrgentMetrics,
    /// Runs the questions.
    pub(crate) runtime: Handle,
    pub(crate) stop: CancellationToken,
}

impl Reader {
    /// Runs until the process shuts down. Failures are logged and retried: nothing depends on the copies.
    pub(crate) fn run(self) -> Result<(), ReadError> {
        let mut log = LogThrottle::default();
        let new_backoff = || Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
        let mut backoff = new_backoff();
        while !self.stop.is_cancelled() {
            let began = Instant::now();
            if let Err(error) = self.follow(&mut log) {
                self.log(&mut log, &error_chain(&error));
                // The next client reads all shards.
                self.copies.unread();
                if began.elapsed() > Duration::from_secs(60) {
                    backoff = new_backoff();
                }
                self.pause(backoff.next_delay());
            }
        }
        Ok(())
    }

    /// Pauses, but not beyond the end of the process.
    fn pause(&self, delay: Duration) {
        let until = Instant::now() + delay;
        while !self.stop.is_cancelled() && Instant::now() < until {
            std::thread::park_timeout(POLL.min(until.saturating_duration_since(Instant::now())));
        }
    }

    fn follow(&self, log: &mut LogThrottle) -> Result<(), ReadError> {
        // Uncommitted: a transaction holds up no copies behind it, and a pin for a command that was aborted ends by itself.
        let mut follower = Follower::uncommitted(&self.kafka, self.copies.reader.clone())?;
        let mut partitions = Partitions::default();
        #[expect(
            clippy::disallowed_methods,
            reason = "an answer must not be lost, and questions are limited: those of partitions that were replaced meanwhile end within their timeout"
        )]
        let (sender, answers) = mpsc::channel();
        while !self.stop.is_cancelled() {
            self.copies.note_progress(Instant::now());
            self.follow_shards(&mut follower, &mut partitions)?;
            let full = partitions.full();
            follower.poll_some(
                POLL,
                |_, partition| !full.contains(&partition),
                |event| {
                    self.visit(event, &mut partitions, log);
                    ControlFlow::Continue(())
                },
            )?;
            let now = Instant::now();
            for answer in answers.try_iter() {
                self.take_answer(answer, &mut partitions, log);
            }
            for (partition, question, number) in partitions.questions(now) {
                self.ask(follower.ends(), partition, question, number, &sender);
            }
            if partitions.pass_on(&self.copies, &self.metrics) {
                self.copies.waker.wake();
            }
        }
        Ok(())
    }

    fn visit(&self, event: Event, partitions: &mut Partitions, log: &mut LogThrottle) {
        match event {
            Event::Record(copy) => {
                let read = read_copy(&copy, &self.settings, self.clock.now());
                if read.is_none() {
                    self.metrics.invalid.inc();
                    tracing::debug!(
                        position = %copy.position,
                        "record of the urgent topic is no copy of a command that names a job"
                    );
                }
                if let Some(partition) = partitions.get(copy.position.partition) {
                    partition.read(copy.position.offset, read);
                }
            }
            Event::End {
                partition, offset, ..
            } => {
                if let Some(partition) = partitions.get(partition) {
                    partition.end(offset);
                }
            }
            Event::Refused {
                partition: number,
                error,
                is_denied,
                ..
            } => {
                self.log(log, &format!("partition {number}: {error}"));
                if let Some(partition) = partitions.get(number) {
                    partition.refused(Instant::now());
                }
                // Waiting does not help.
                if is_denied && self.copies.give_up(number) {
                    self.copies.waker.wake();
                }
            }
        }
    }

    /// Reads the shards that the lane has: each assignment from its last copies, and partitions that were refused from where they were read
    /// to.
    fn follow_shards(&self, follower: &mut Follower, partitions: &mut Partitions) -> Result<(), ReadError> {
        let now = Instant::now();
        let (owned, new) = self.copies.begin();
        partitions.known.retain(|partition, _| owned.contains(partition));
        follower.retain(|_, partition| owned.contains(&partition))?;
        for partition in new {
            partitions.known.insert(partition, Partition::new(now));
        }
        let mut starts = Vec::new();
        for (number, partition) in &mut partitions.known {
            if let Some(from) = partition.take_start(now) {
                starts.push(Start {
                    topic: self.copies.topic.clone(),
                    partition: *number,
                    from,
                });
            }
        }
        if starts.is_empty() {
            return Ok(());
        }
        follower.add(&starts)
    }

    /// Asks a broker in another thread, so that one which does not answer holds up no other partition.
    fn ask(
        &self,
        ends: Ends,
        partition: i32,
        question: Question,
        number: u64,
        answers: &mpsc::Sender<Answer>,
    ) {
        let topic = match question {
            Question::Originals => self.settings.ingest.clone(),
            Question::Copies => self.copies.topic.clone(),
        };
        let reply = Reply {
            answer: Some(Answer {
                partition,
                question,
                number,
                end: Err("the question failed".to_owned()),
            }),
            answers: answers.clone(),
            reader: self.copies.reader.clone(),
        };
        self.runtime.spawn_blocking(move || {
            let end = ends.of(&topic, partition);
            // It may be the last handle of a client that was replaced.
            drop(ends);
            reply.send(end.map_err(|error| error_chain(&error)));
        });
    }

    fn take_answer(&self, answer: Answer, partitions: &mut Partitions, log: &mut LogThrottle) {
        let Answer {
            partition,
            question,
            number,
            end,
        } = answer;
        let end = end.map_err(|reason| self.log(log, &reason)).ok();
        if let Some(partition) = partitions.get(partition) {
            let made_up = partition.answered(number, question, end, Instant::now());
            self.metrics.invalid.inc_by(made_up as u64);
        }
    }

    fn log(&self, log: &mut LogThrottle, reason: &str) {
        if log.should_log() {
            tracing::warn!(
                topic = &*self.copies.topic,
                reason,
                "cannot read the urgent topic; commands wait for their turn in the ingest topic"
            );
        }
    }
}

/// The answer to a question about a partition.
struct Answer {
    partition: i32,
    question: Question,
    number: u64,
    /// The end of the partition, or why it is not known.
    end: Result<i64, String>,
}

/// Sends an answer, also if there is none.
struct Reply {
    answer: Option<Answer>,
    answers: mpsc::Sender<Answer>,
    reader: Waker,
}

impl Reply {
    fn send(mut self, end: Result<i64, String>) {
        if let Some(answer) = &mut self.answer {
            answer.end = end;
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(answer) = self.answer.take() {
            // The receiver is gone if the client was replaced or the process ends.
            let _ = self.answers.send(answer);
            self.reader.wake();
        }
    }
}

/// The partitions of the lane's shards.
#[derive(Default)]
struct Partitions {
    known: HashMap<i32, Partition>,
    /// The number of the next question.
    next_question: u64,
}

impl Partitions {
    fn get(&mut self, number: i32) -> Option<&mut Partition> {
        self.known.get_mut(&number)
    }

    /// The partitions of which nothing is to be read now.
    fn full(&self) -> Vec<i32> {
        let full = self.known.iter().filter(|(_, partition)| partition.is_full());
        full.map(|(number, _)| *number).collect()
    }

    /// What is to be asked now, with the numbers of the questions. Some of the questions remain for partitions whose brokers answer.
    fn questions(&mut self, now: Instant) -> Vec<(i32, Question, u64)> {
        let asking = || self.known.values().filter(|partition| partition.is_asking());
        let mut open = asking().count();
        let mut repeated = asking().filter(|partition| partition.is_unanswered()).count();
        let mut questions = Vec::new();
        for (number, partition) in &mut self.known {
            let is_repeated = partition.is_unanswered();
            if open >= MAX_QUESTIONS || is_repeated && repeated >= MAX_REPEATED_QUESTIONS {
                continue;
            }
            if let Some(question) = partition.ask(self.next_question, now) {
                questions.push((*number, question, self.next_question));
                self.next_question += 1;
                open += 1;
                repeated += usize::from(is_repeated);
            }
        }
        questions
    }

    /// Passes on what there is room for. Returns whether a shard has something to take.
    fn pass_on(&mut self, copies: &UrgentCopies, metrics: &UrgentMetrics) -> bool {
        let mut is_new = false;
        for (number, partition) in &mut self.known {
            is_new |= partition.pass_on(*number, copies, metrics);
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use redeliver_kafka::AssignmentId;

    use super::*;
    use crate::shard::{NamedBy, UrgentCopy};
    use crate::urgent::partition::MAX_WAITING;

    /// The lane has so many shards. A copy was read for each.
    fn with_copies(shards: i32) -> (Arc<UrgentCopies>, AssignmentId, Partitions) {
        let copies = UrgentCopies::new("urgent".into(), Waker::new());
        let mut partitions = Partitions::default();
        for shard in 0..shards {
            copies.assigned(AssignmentId::for_tests(0, 1), shard);
            partitions.known.insert(shard, Partition::new(Instant::now()));
            read(&mut partitions, shard, 0);
        }
        copies.begin();
        (copies, AssignmentId::for_tests(0, 1), partitions)
    }

    fn read(partitions: &mut Partitions, shard: i32, offset: i64) {
        let names = NamedBy::Key([7; 16]);
        let copy = UrgentCopy { names, original: 5 };
        partitions.get(shard).unwrap().read(offset, Some(copy));
    }

    #[test]
    fn a_partition_whose_broker_does_not_answer_holds_up_no_other() {
        let (copies, assignment, mut partitions) = with_copies(2);
        let metrics = UrgentMetrics::default();
        let now = Instant::now();
        let questions = partitions.questions(now);
        assert_eq!(questions.len(), 2);
        for (shard, question, number) in questions {
            if shard == 1 {
                partitions
                    .get(1)
                    .unwrap()
                    .answered(number, question, Some(10), now);
            }
        }
        for offset in 1..=i64::try_from(MAX_WAITING).unwrap() {
            read(&mut partitions, 0, offset);
            read(&mut partitions, 1, offset);
            assert!(partitions.pass_on(&copies, &metrics) || offset > 1);
        }
        assert_eq!(partitions.full(), [0], "the other one is read");
        let taken = [0, 1].map(|shard| copies.take(assignment, shard, 0, true).copies.len());
        assert_eq!(taken, [0, 1]);
    }

    #[test]
    fn partitions_whose_brokers_answer_can_be_asked_for_however_many_others_are_not() {
        let shards = 2 * i32::try_from(MAX_QUESTIONS).unwrap();
        let (_copies, _, mut partitions) = with_copies(shards);
        let mut now = Instant::now();
        // No partition is answered.
        for _ in 0..4 {
            for (shard, question, number) in partitions.questions(now) {
                partitions
                    .get(shard)
                    .unwrap()
                    .answered(number, question, None, now);
            }
        }
        assert!(partitions.known.values().all(Partition::is_unanswered));
        now += Duration::from_secs(60);
        assert_eq!(partitions.questions(now).len(), MAX_REPEATED_QUESTIONS);
        // They wait. A new partition does not.
        partitions.known.insert(shards, Partition::new(now));
        read(&mut partitions, shards, 0);
        let questions: Vec<i32> = partitions
            .questions(now)
            .into_iter()
            .map(|(shard, ..)| shard)
            .collect();
        assert_eq!(questions, [shards]);
    }
}
