//! Writes commands to the ingest topic, and copies of those that name a job to the urgent topic.
//!
//! A command and its copy are written by a task of their own. Otherwise, the command of a caller that disconnects at the wrong moment would
//! have no copy.

use std::sync::Arc;

use futures::future::BoxFuture;
use prometheus_client::metrics::counter::Counter;
use redeliver_core::{Headers, Output};
use redeliver_kafka::producer::Producer;
use redeliver_kafka::{TopicState, TopicWatch};
use redeliver_runtime::error_chain::error_chain;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::error::RequestError;
use super::jobs::OUTCOME_TIMEOUT;
use crate::answers::PendingOutcome;
use crate::job::JobId;
use crate::request::{ParsedRequest, write_protobuf};
use crate::urgent;

/// The maximum number of writes that wait to be started.
pub(super) const WRITES: usize = 64;

/// A write that goes on when its caller is gone.
pub(super) type OwnedWrite = BoxFuture<'static, ()>;

/// Writes commands. Cloning is cheap.
#[derive(Clone)]
pub(crate) struct CommandWriter {
    pub(super) producer: Producer,
    pub(super) ingest: Arc<str>,
    /// The urgent topic, if there is one.
    pub(super) urgent: Option<Arc<UrgentTopic>>,
    /// Cancelled when the process cannot wait any longer.
    pub(super) gave_up: CancellationToken,
}

/// The urgent topic.
pub(super) struct UrgentTopic {
    pub(super) name: Arc<str>,
    pub(super) watch: TopicWatch,
    pub(super) producer: Producer,
    /// Copies that could not be written.
    pub(super) unwritten: Counter,
    /// To [`run_writes`].
    pub(super) writes: mpsc::Sender<OwnedWrite>,
}

impl CommandWriter {
    /// The record of a command.
    pub(super) fn record(
        &self,
        request: &ParsedRequest,
        partition: i32,
        answer_to: &str,
        trace: Headers,
    ) -> Output {
        let mut headers = trace;
        headers.push_text("content-type", redeliver_proto::CONTENT_TYPE);
        Output {
            topic: self.ingest.clone(),
            partition: Some(partition),
            key: None,
            value: Some(write_protobuf(request, answer_to)),
            headers,
        }
    }

    /// Writes a command. The id is that of the job that a request to schedule creates.
    pub(super) async fn write(&self, command: &Output, deadline: Instant) -> Result<JobId, RequestError> {
        let sent = tokio::select! {
            biased;
            sent = self.producer.send(command) => sent,
            () = tokio::time::sleep_until(deadline) => return Err(unconfirmed("timed out")),
            () = self.gave_up.cancelled() => return Err(unconfirmed("this scheduler is shutting down")),
        };
        let written = sent?;
        let timestamp = written
            .timestamp
            .ok_or_else(|| unconfirmed("the topic keeps no timestamps"))?;
        if written.position.offset < 0 {
            // A retry of the client found that the command was written before.
            return Err(unconfirmed("the offset of the request is unknown"));
        }
        Ok(JobId::new(
            timestamp,
            written.position.partition,
            written.position.offset,
        ))
    }

    /// Writes a command that names a job, and then its copy, which the caller does not wait for. `registered` ends after the copy, so that
    /// a shutdown waits for it.
    pub(super) async fn write_with_copy(
        &self,
        command: Output,
        deadline: Instant,
        registered: PendingOutcome,
    ) -> Result<JobId, RequestError> {
        let Some(urgent) = self.urgent.clone() else {
            return self.write(&command, deadline).await;
        };
        let (reply, written) = oneshot::channel();
        let (writer, topic) = (self.clone(), urgent.clone());
        let write = async move {
            let id = writer.write(&command, deadline).await;
            let copied = id.as_ref().ok().copied();
            // The caller may be gone. The command takes effect in any case.
            let _ = reply.send(id);
            if let Some(id) = copied {
                topic.write_copy_of(&command, id, &writer.gave_up).await;
            }
            drop(registered);
        };
        let ended = || unconfirmed("this scheduler is shutting down");
        urgent.writes.send(Box::pin(write)).await.map_err(|_| ended())?;
        written.await.map_err(|_| ended())?
    }
}

fn unconfirmed(reason: &str) -> RequestError {
    RequestError::Unconfirmed(reason.to_owned())
}

impl UrgentTopic {
    /// Writes the copy of a command, unless the topic does not exist.
    async fn write_copy_of(&self, command: &Output, id: JobId, gave_up: &CancellationToken) {
        let exists = match self.watch.state(&self.name) {
            TopicState::Exists { partitions, .. } => id.shard() < partitions,
            TopicState::Missing { .. } => false,
            // If it does not exist, the write fails.
            TopicState::Unknown => true,
        };
        let copy = urgent::copy_of(command, self.name.clone(), id).filter(|_| exists);
        let Some(copy) = &copy else {
            self.unwritten.inc();
            return;
        };
        let failure = tokio::select! {
            biased;
            sent = self.producer.send(copy) => match sent {
                Ok(_) => return,
                Err(error) => error_chain(&error),
            },
            () = gave_up.cancelled() => "this scheduler is shutting down".to_owned(),
            // The commands in progress are limited, and a partition that cannot be written must not use up that limit.
            () = sleep(OUTCOME_TIMEOUT) => "the topic cannot be written in time".to_owned(),
        };
        self.unwritten.inc();
        tracing::debug!(reason = failure, "cannot write the copy of a command");
    }
}

/// Runs writes to their ends. Ends when no more can come.
pub(super) async fn run_writes(mut writes: mpsc::Receiver<OwnedWrite>) -> Result<(), JoinError> {
    let mut running = JoinSet::new();
    loop {
        tokio::select! {
            write = writes.recv() => match write {
                Some(write) => drop(running.spawn(write)),
                None => break,
            },
            Some(ended) = running.join_next(), if !running.is_empty() => ended?,
        }
    }
    while let Some(ended) = running.join_next().await {
        ended?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {

    use redeliver_core::Timestamp;
    use redeliver_kafka::KafkaSettings;
    use redeliver_kafka::embedded::EmbeddedBroker;
    use redeliver_kafka::reader::TopicReader;
    use redeliver_testkit::DEADLINE;

    use super::*;
    use crate::answers::PendingOutcomes;
    use crate::request::JobRef;

    #[tokio::test]
    async fn the_copy_of_a_command_is_written_although_its_caller_is_gone() {
        let topics = ["ingest", "urgent"].map(|topic| (topic.to_owned(), 1));
        let broker = EmbeddedBroker::start(&topics).unwrap();
        let kafka = KafkaSettings::new(broker.brokers(), "test");
        let (sender, writes) = mpsc::channel(WRITES);
        let mut running = JoinSet::new();
        running.spawn(run_writes(writes));
        let outcomes = PendingOutcomes::new();
        let unwritten = Counter::default();
        let writer = CommandWriter {
            producer: Producer::new(&kafka).unwrap(),
            ingest: "ingest".into(),
            urgent: Some(Arc::new(UrgentTopic {
                name: "urgent".into(),
                watch: TopicWatch::start(&kafka).unwrap(),
                producer: Producer::new(&kafka).unwrap(),
                unwritten: unwritten.clone(),
                writes: sender,
            })),
            gave_up: CancellationToken::new(),
        };
        let job = JobId::new(Timestamp::from_millis(1), 0, 0);
        let command = writer.record(&ParsedRequest::Cancel(JobRef::Id(job)), 0, "", Headers::new());
        let deadline = Instant::now() + DEADLINE;
        let registered = outcomes.register_write().unwrap();
        let mut write = Box::pin(writer.write_with_copy(command, deadline, registered));
        assert!(futures::poll!(&mut write).is_pending());
        drop(write);
        // The registration of the write ends.
        tokio::time::timeout(DEADLINE, outcomes.close()).await.unwrap();
        let mut reader = TopicReader::new(&kafka, &["ingest".into(), "urgent".into()]).unwrap();
        let mut read = Vec::new();
        reader
            .read_to_end(DEADLINE, |record| read.push(record.position.topic))
            .unwrap();
        read.sort_unstable();
        assert_eq!(read, ["ingest".into(), Arc::<str>::from("urgent")]);
        assert_eq!(unwritten.get(), 0);
        drop(writer);
        running.join_next().await.unwrap().unwrap().unwrap();
    }
}
