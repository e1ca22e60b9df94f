//! Reads the topics of a pipeline, which may be running.
//!
//! A pass has four steps, in this order:
//!
//! 1. Read the output and the dead letters to their ends.
//! 2. Read the committed offsets: of the workers' group in the source and the due topic, of each tier's group in the
//!    topic of the tier, and of the scheduler's group in the ingest topic.
//! 3. Read to their ends: the ingest and state topic of the scheduler, if long waits go there; then the tiers and the
//!    due topic; then the source, up to the last record that its group had completed in step 2. A record is *unread* if its offset is at or after the
//!    committed offset of its group and not in the completed set. A job is unread if its newest state has not ended.
//! 4. Read the output and the dead letters again, to their new ends.
//!
//! In step 2, only the ends of step 1 are known. They are read after it, with the parts of the other topics that are as old ([`crate::pass`]).
//!
//! # Why a record that is not lost is never reported as lost
//! One transaction completes a record's offset and writes its next copy. So the copies of a record form a chain: c0 in
//! the source, then copies in tiers and the due topic, and the last one in the output or the dead letters. Assume that
//! step 3 read c0 and that no copy in the chain is unread. c0 is not unread, so it was complete in step 2. So c1 was
//! written before step 3, and step 3 reads it, because a reader waits for open transactions. c1 is not unread either,
//! so it was complete in step 2, and so on. The whole chain, including its end, was written before step 3, and step 4
//! reads the end. So a record without an unread copy and without an end is lost.
//!
//! A job of the scheduler is completed by the transaction that writes its next state and the record in the due topic.
//! Step 3, not step 2, shows whether it is complete. The record in the due topic can be newer than step 2, but step 3
//! reads the due topic after the state topic. So it reads that record, and the record is unread.
//!
//! # Why a record that is not doubled is never reported as doubled
//! A chain has one end. If step 1 read an end, all copies in its chain were complete before step 2, whose result
//! includes transactions that are committed but not applied yet. So an unread copy belongs to a second chain, and so
//! does a job that has not ended in step 3.
//!
//! Tiers are read before the source, so that the source contains the origins that they name: those that were completed after step 2 are not checked until
//! the next pass.
//!
//! # Several passes
//! A pass need not read again what the one before has read: the copies that were unread are remembered, and compared with the new committed offsets. If a record
//! has ended before step 2 of a pass, step 3 of the same pass reads the last copies of its chain. So a copy that a later pass reads belongs to a second
//! chain, as another end does, and the record need not be remembered.
//!
//! # Assumptions
//! - The topics still contain the ends of all records in the source. If the retention of the output is shorter than
//!   that of the source, old records are reported as lost.
//! - The number of partitions does not change during the audit.
//!
//! In a pipeline that drops results, a second result is not found if a pass was between them.
//!
//! If two copies of a record wait at the same time, the audit reports the record as doubled only after one of them has
//! ended.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{HandlerChanges, Pipeline, SchedulerTopics, Timestamp};
use redeliver_kafka::KafkaSettings;
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::survey::Surveyor;

use crate::pass::{Clients, Fault, LongWait, Pace, PipelineAudit, failed, long_wait};
use crate::report::Report;

/// The options of an audit.
#[derive(Clone, Debug)]
pub struct AuditOptions {
    /// What the handler of the pipeline may change in a result.
    pub changes: HandlerChanges,
    /// The consumer group and the topics of the scheduler, if long waits go there.
    pub scheduler: Option<(String, SchedulerTopics)>,
    /// The timeout of each step.
    pub timeout: Duration,
}

impl Default for AuditOptions {
    /// Results must be unchanged, there is no scheduler, and the timeout is 10 minutes.
    fn default() -> Self {
        Self {
            changes: HandlerChanges::default(),
            scheduler: None,
            timeout: Duration::from_secs(600),
        }
    }
}

/// The audit failed, so there is no report.
#[derive(Debug, thiserror::Error)]
#[error("pipeline `{pipeline}`")]
pub struct AuditError {
    /// The name of the pipeline.
    pub pipeline: String,
    /// Why.
    pub source: Fault,
}

/// Audits a pipeline. Blocks the calling thread, so do not call it from an async task. Writes nothing and joins no
/// consumer group.
///
/// # Errors
/// If a topic does not exist, the broker is unavailable, or a step exceeds its timeout.
pub fn audit(
    settings: &KafkaSettings,
    pipeline: &Pipeline,
    options: &AuditOptions,
) -> Result<Report, AuditError> {
    let mut audits = [PipelineAudit::new(pipeline.clone(), options.changes)];
    let stop = || false;
    let mut pace = Pace::new(options.timeout, &stop);
    let mut once = || -> Result<Report, Fault> {
        let mut auditor =
            Auditor::new(settings, options.scheduler.clone()).map_err(failed("connect to Kafka"))?;
        let mut passed = None;
        // There is no limit, so that the clock is not needed.
        auditor.pass(&mut audits, Timestamp::from_millis(0), &mut pace, |_, result| {
            passed = Some(result);
        });
        passed.unwrap_or(Err(Fault::Stopped))
    };
    once().map_err(|source| AuditError {
        pipeline: pipeline.name.to_string(),
        source,
    })
}

/// Audits pipelines again and again, with two connections for all of them.
pub struct Auditor {
    clients: Clients,
    /// The next offset of each partition of the scheduler's topics.
    next: BTreeMap<(Arc<str>, i32), i64>,
}

impl Auditor {
    /// Does not connect yet. `scheduler`: the consumer group and the topics of the scheduler, if long waits of any pipeline go there.
    ///
    /// # Errors
    /// If a client cannot be created from its configuration.
    pub fn new(
        settings: &KafkaSettings,
        scheduler: Option<(String, SchedulerTopics)>,
    ) -> Result<Self, ReadError> {
        let clients = Clients {
            settings: settings.clone(),
            surveyor: Surveyor::new(settings)?,
            reader: TopicReader::new(settings, &[])?,
            scheduler,
        };
        Ok(Self {
            clients,
            next: BTreeMap::new(),
        })
    }

    /// Audits each of these pipelines, which are the same each time, and reports what it finds. Blocks, writes nothing, and joins no consumer group.
    pub fn pass(
        &mut self,
        audits: &mut [PipelineAudit],
        now: Timestamp,
        pace: &mut Pace<'_>,
        mut found: impl FnMut(&mut PipelineAudit, Result<Report, Fault>),
    ) {
        let pipelines: Vec<Pipeline> = audits.iter().map(|audit| audit.pipeline.clone()).collect();
        let roles = self.clients.surveyor.roles(&pipelines).map_err(Arc::new);
        let mut roles = roles.map(Vec::into_iter);
        let mut begun = Vec::new();
        let mut lacks_scheduler = false;
        for audit in &mut *audits {
            let result = match &mut roles {
                Ok(roles) => {
                    let roles = roles.next().unwrap_or_default();
                    audit.begin(&mut self.clients, roles, now)
                }
                Err(error) => Err(failed("list the retry topics")(error.clone())),
            };
            begun.push(result.is_ok());
            // One that does not read the scheduler now misses what is new.
            let lacked = std::mem::replace(&mut audit.lacks_scheduler, result.is_err());
            match result {
                Ok(()) => lacks_scheduler |= audit.waits_long() && lacked,
                Err(fault) => found(audit, Err(fault)),
            }
        }
        if lacks_scheduler {
            self.next.clear();
            audits.iter_mut().for_each(PipelineAudit::forget_jobs);
        }
        let scheduler = self.read_scheduler(audits, &begun, pace);
        let mut kept: Vec<usize> = audits.iter().map(PipelineAudit::kept).collect();
        for (index, audit) in audits.iter_mut().enumerate().filter(|(index, _)| begun[*index]) {
            if (pace.stop)() {
                return;
            }
            kept[index] = 0;
            pace.kept_by_others = kept.iter().sum();
            pace.kept_by_largest = kept.iter().copied().max().unwrap_or(0);
            let result = match &scheduler {
                Err(error) if audit.waits_long() => {
                    Err(failed("read the waiting records in the scheduler")(error.clone()))
                }
                _ => audit.read(&mut self.clients.reader, pace),
            };
            found(audit, result);
            kept[index] = audit.kept();
        }
    }

    /// Reads the commands and jobs of the scheduler for the pipelines whose pass has begun.
    fn read_scheduler(
        &mut self,
        audits: &mut [PipelineAudit],
        begun: &[bool],
        pace: &mut Pace<'_>,
    ) -> Result<(), Arc<ReadError>> {
        let Some((_, topics)) = &self.clients.scheduler else {
            return Ok(());
        };
        let waiting = audits.iter_mut().zip(begun);
        let waiting = waiting.filter(|(audit, begun)| audit.waits_long() && **begun);
        let mut waiting: HashMap<String, &mut PipelineAudit> = waiting
            .map(|(audit, _)| (audit.name().to_owned(), audit))
            .collect();
        if waiting.is_empty() {
            return Ok(());
        }
        // Commands first: the job of one that is complete is in the state topic.
        for topic in [&topics.ingest, &topics.state] {
            let reader = &mut self.clients.reader;
            for ((topic, partition), extent) in reader.extents(std::slice::from_ref(topic))? {
                self.next.entry((topic, partition)).or_insert(extent.low);
            }
            let parts = self.next.iter().filter(|((of, _), _)| of == topic);
            reader.seek_all(parts.map(|(partition, next)| (partition.clone(), *next)));
            let next = &mut self.next;
            let (timeout, stop) = (pace.timeout, pace.ends_late());
            reader.read_to_end_in_parts(timeout, stop, |record| {
                pace.read(&record);
                let partition = (record.position.topic.clone(), record.position.partition);
                let next = next.entry(partition).or_insert(0);
                if record.position.offset < *next {
                    return;
                }
                *next = record.position.offset + 1;
                match long_wait(&record, topics) {
                    LongWait::Command(found) => {
                        if let Some((pipeline, record)) = found
                            && let Some(audit) = waiting.get_mut(&pipeline)
                        {
                            audit.command(&record);
                        }
                    }
                    LongWait::Job(id, found) => {
                        for (name, audit) in &mut waiting {
                            let record = found.as_ref().filter(|(pipeline, _)| pipeline == name);
                            audit.job(id, record.map(|(_, record)| record));
                        }
                    }
                }
            })?;
            for ((of, partition), next) in next {
                if let Some(position) = self
                    .clients
                    .reader
                    .position(of, *partition)
                    .filter(|_| of == topic)
                {
                    *next = position.max(*next);
                }
            }
        }
        Ok(())
    }
}
