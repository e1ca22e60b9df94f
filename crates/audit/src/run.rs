//! Reads the topics of a pipeline, which may be running.
//!
//! A pass has four steps, in this order:
//!
//! 1. Request the ends of all topics, those of the source last.
//! 2. Read the committed offsets: of the workers' group in the source and the due topic, of each tier's group in the
//!    topic of the tier, and of the scheduler's group in the ingest topic.
//! 3. Read the output and the dead letters up to the ends of step 1. Then read to their ends: the ingest and state topic of the scheduler, if long waits go
//!    there; the tiers and the due topic; the source. A record is *unread* if its offset is at or after the committed offset of its group and not in the
//!    completed set. A job is unread if its newest state has not ended.
//! 4. Read the output and the dead letters again, to their new ends.
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
//! A chain has one end. If an end is before the ends of step 1, all copies in its chain were complete before step 2, whose result
//! includes transactions that are committed but not applied yet. So an unread copy belongs to a second chain, and so
//! does a job that has not ended in step 3.
//!
//! Tiers are read before the source, so that the source contains the origins that they name.
//!
//! # From now on
//! An audit that goes on ([`PipelineAudit::from_now`]) begins with its first step 1: a record that is in the source after it has all of its copies after the ends
//! of the other topics. It reads what is new:
//!
//! - The copies that were unread are remembered, and compared with the new committed offsets.
//! - The source is read up to the last record that was complete in step 2. A later one waits there, and has no other copy. If retries return to the source, the
//!   rest is read ahead, and of the rest, only retries are kept.
//! - A record that has ended before step 2, and does not wait, is forgotten. Step 3 has read all copies of its chain, so that a copy that a later pass reads belongs
//!   to a second chain, as another end does.
//!
//! # Assumptions
//! - The topics still contain the ends of all records in the source. If the retention of the output is shorter than
//!   that of the source, an audit of all records reports old ones as lost. An audit from now on notices it.
//! - The number of partitions does not change during a pass.
//!
//! In a pipeline that drops results, a second result is not found if a pass was between them.
//!
//! If two copies of a record wait at the same time, the audit reports the record as doubled only after one of them has
//! ended.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use redeliver_core::{HandlerChanges, JobId, Pipeline, Record, SchedulerTopics, Timestamp};
use redeliver_kafka::reader::{ReadError, TopicReader};
use redeliver_kafka::survey::{Extent, Surveyor};
use redeliver_kafka::{KafkaSettings, TopicId};
use redeliver_proto::long_wait;

use crate::pass::{Clients, Fault, Offsets, Pace, PipelineAudit, failed};
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
    let mut audits = [PipelineAudit::of_all(pipeline.clone(), options.changes)];
    let stop = || false;
    let mut pace = Pace::new(options.timeout, &stop);
    let mut passed = Err(Fault::Stopped);
    let auditor = Auditor::new(settings, options.scheduler.clone(), false);
    let auditor = auditor.map_err(failed("connect to Kafka"));
    // The time does not matter for an audit of all records.
    let result = auditor.and_then(|mut auditor| {
        auditor.pass(&mut audits, Timestamp::from_millis(0), &mut pace, |_, result| {
            passed = result;
        });
        passed
    });
    result.map_err(|source| AuditError {
        pipeline: pipeline.name.to_string(),
        source,
    })
}

/// Audits pipelines, once or again and again, with two connections for all of them.
pub struct Auditor {
    clients: Clients,
    /// Whether it begins with what is new in the topics of the scheduler.
    from_now: bool,
    /// The ids of the scheduler's topics, and the next offset of each partition.
    ids: BTreeMap<String, TopicId>,
    next: Offsets,
    /// Whether something could not be read in the last pass.
    has_failed: bool,
}

impl Auditor {
    /// Does not connect yet. `scheduler`: the consumer group and the topics of the scheduler, if long waits of any pipeline go there. `from_now`: whether its
    /// audits are those of [`PipelineAudit::from_now`].
    ///
    /// # Errors
    /// If a client cannot be created from its configuration.
    pub fn new(
        settings: &KafkaSettings,
        scheduler: Option<(String, SchedulerTopics)>,
        from_now: bool,
    ) -> Result<Self, ReadError> {
        let clients = Clients {
            settings: settings.clone(),
            surveyor: Surveyor::new(settings)?,
            reader: TopicReader::new(settings, &[])?,
            scheduler,
        };
        Ok(Self {
            clients,
            from_now,
            ids: BTreeMap::new(),
            next: Offsets::new(),
            has_failed: false,
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
        if std::mem::take(&mut self.has_failed)
            && let Ok(reader) = TopicReader::new(&self.clients.settings, &[])
        {
            // With the credentials that the files contain now.
            self.clients.reader = reader;
        }
        let mut has_failed = false;
        let mut found = |audit: &mut PipelineAudit, result: Result<Report, Fault>| {
            has_failed |= matches!(result, Err(Fault::Read { .. }));
            found(audit, result);
        };
        let pipelines: Vec<Pipeline> = audits.iter().map(|audit| audit.pipeline.clone()).collect();
        let roles = self.clients.surveyor.roles(&pipelines).map_err(Arc::new);
        let mut roles = roles.map(Vec::into_iter);
        let scheduler = self.begin_scheduler(audits);
        let mut begun = Vec::new();
        for audit in &mut *audits {
            let roles = match &mut roles {
                Ok(roles) => Ok(roles.next().unwrap_or_default()),
                Err(error) => Err(error.clone()),
            };
            let result = match (roles, &scheduler) {
                (Err(error), _) => Err(failed("list the retry topics")(error)),
                (_, Err(error)) if audit.waits_long() => {
                    Err(failed("read the ends of the scheduler's topics")(error.clone()))
                }
                (_, Ok(false)) if audit.reads_scheduler() => Err(Fault::Changed),
                (Ok(roles), _) => audit.begin(&self.clients, roles, now),
            };
            begun.push(result.is_ok());
            if let Err(fault) = result {
                found(audit, Err(fault));
            }
        }
        let scheduler = self.read_scheduler(audits, pace);
        let mut kept: Vec<usize> = audits.iter().map(PipelineAudit::kept).collect();
        for (index, audit) in audits.iter_mut().enumerate().filter(|(index, _)| begun[*index]) {
            if (pace.stop)() {
                break;
            }
            kept[index] = 0;
            pace.kept_by_others = kept.iter().sum();
            let others = kept.iter().zip(&begun).filter(|(_, begun)| **begun);
            pace.kept_by_largest = others.map(|(kept, _)| *kept).max().unwrap_or(0);
            let result = match &scheduler {
                Err(error) if audit.waits_long() => {
                    Err(failed("read the waiting records in the scheduler")(error.clone()))
                }
                _ => audit.read(&mut self.clients, pace),
            };
            found(audit, result);
            kept[index] = audit.kept();
        }
        self.has_failed = has_failed;
    }

    /// Decides where to begin with partitions of the scheduler that are new. Returns false if a topic was created again.
    fn begin_scheduler(&mut self, audits: &[PipelineAudit]) -> Result<bool, Arc<ReadError>> {
        let Some((_, topics)) = &self.clients.scheduler else {
            return Ok(true);
        };
        if !audits.iter().any(PipelineAudit::waits_long) {
            return Ok(true);
        }
        let topics = [topics.ingest.clone(), topics.state.clone()];
        let ids = self.clients.ids(&topics)?;
        let extents = self.clients.reader.extents(&topics)?;
        let is_other =
            |(topic, id): (&String, &TopicId)| self.ids.get(topic).is_some_and(|known| known != id);
        let is_beyond = |(partition, extent): (&_, &Extent)| {
            self.next.get(partition).is_some_and(|next| extent.end < *next)
        };
        let is_new = ids.iter().any(is_other) || extents.iter().any(is_beyond);
        if is_new {
            self.next.clear();
        }
        let begins_now = self.from_now && self.next.is_empty();
        for (partition, Extent { low, end }) in extents {
            let begin = if begins_now { end } else { low };
            let next = self.next.entry(partition).or_insert(begin);
            *next = low.max(*next);
        }
        self.ids = ids;
        Ok(!is_new)
    }

    /// Reads the commands and jobs of the scheduler, also for pipelines whose pass has not begun: they would miss them.
    fn read_scheduler(
        &mut self,
        audits: &mut [PipelineAudit],
        pace: &mut Pace<'_>,
    ) -> Result<(), Arc<ReadError>> {
        let Some((_, SchedulerTopics { ingest, state, .. })) = self.clients.scheduler.clone() else {
            return Ok(());
        };
        let waiting = audits.iter_mut().filter(|audit| audit.reads_scheduler());
        let mut waiting: HashMap<String, &mut PipelineAudit> =
            waiting.map(|audit| (audit.name().to_owned(), audit)).collect();
        if waiting.is_empty() {
            return Ok(());
        }
        // Commands first: the job of one that is complete is in the state topic.
        let is_read = |(topic, _): &(Arc<str>, i32)| *topic == ingest;
        self.clients.read(&mut self.next, is_read, None, pace, |record| {
            if let Some((pipeline, record)) = long_wait::unwrap_any(record)
                && let Some(audit) = waiting.get_mut(&pipeline)
            {
                audit.command(&record);
            }
        })?;
        let is_read = |(topic, _): &(Arc<str>, i32)| *topic == state;
        self.clients.read(&mut self.next, is_read, None, pace, |record| {
            let Some(id) = job_id(record) else {
                return;
            };
            let found = long_wait::unwrap_any_state(record);
            for (name, audit) in &mut waiting {
                let record = found.as_ref().filter(|(pipeline, _)| pipeline == name);
                audit.job(id, record.map(|(_, record)| record));
            }
        })?;
        Ok(())
    }
}

/// The id of the job that a record of the state topic is about.
fn job_id(record: &Record) -> Option<JobId> {
    std::str::from_utf8(record.key.as_deref()?).ok()?.parse().ok()
}
