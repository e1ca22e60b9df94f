//! `GetJobOutcomes`.

use std::sync::Arc;

use redeliver_core::pipeline::{TopicRole, is_topic_name, parse_retry_topic};
use redeliver_core::{JobId, Pipeline, Position, Record};
use redeliver_proto::convert::{time_of_record, to_timestamp};
use redeliver_proto::error::{invalid, status};
use redeliver_proto::{long_wait, v1};
use tonic::{Code, Status};
use v1::JobOutcomeState as State;

use super::waiting::too_many_scans;
use super::{Api, bounded, kafka_unavailable, shutting_down};
use crate::access::Viewer;
use crate::index;
use crate::job_outcomes::Known;
use crate::job_outcomes::copy::{JobCopy, job_id};
use crate::job_outcomes::progress::{AskError, Progress};
use crate::ledger;
use crate::letter::content_hash;
use crate::waiting::facts::Visible;
use crate::waiting::timeline::Location;

/// How many copies a call examines at most, because the record moves on meanwhile.
const MAX_EXAMINED: usize = 4;

/// How many edits of a record are followed at most.
const MAX_EDITS: usize = 1_000;

/// What a known copy proves.
enum Evidence {
    Outcome(Box<v1::JobOutcome>),
    /// Nothing, for this reason, unless a later copy is found.
    Nothing(String),
}

impl Api {
    pub(super) async fn job_outcomes(
        &self,
        viewer: &Viewer,
        request: &v1::GetJobOutcomesRequest,
    ) -> Result<v1::GetJobOutcomesResponse, Status> {
        let id = job_of("id", &request.id)?;
        if !request.topic.is_empty() && !is_topic_name(&request.topic) {
            return Err(invalid(
                "topic",
                "is not the name of a topic",
                "TOPIC_INVALID",
                [],
            ));
        }
        let is_asked = |number: u16, pipeline: &Pipeline| match &*request.topic {
            "" => self.outcomes.find(number, id).is_some(),
            topic => *pipeline.source == *topic,
        };
        let pipelines = self.outcomes.pipelines().filter(|(number, pipeline)| {
            viewer.sees(&pipeline.dead_letter_topic()) && is_asked(*number, pipeline)
        });
        let mut outcomes = Vec::new();
        for (number, pipeline) in pipelines {
            check_mask(viewer, &pipeline.dead_letter_topic())?;
            outcomes.push(self.outcome_in(viewer, number, pipeline, id).await?);
        }
        Ok(v1::GetJobOutcomesResponse { outcomes })
    }

    /// The position of a copy of a job in one of the pipelines that the caller sees, or in this one.
    pub(super) async fn position_of_job(
        &self,
        viewer: &Viewer,
        id: &str,
        pipeline: &str,
    ) -> Result<Position, Status> {
        let job = job_of("id", id)?;
        for (number, known) in self.outcomes.pipelines() {
            let topic = known.dead_letter_topic();
            if !pipeline.is_empty() && *known.name != *pipeline || !viewer.sees(&topic) {
                continue;
            }
            let Some(known) = self.outcomes.find(number, job) else {
                continue;
            };
            check_mask(viewer, &topic)?;
            // Another record can be there by now, of a topic that was created again.
            if self
                .stored(&known.position)
                .await?
                .is_some_and(|record| is_of_job(&record, job))
            {
                return Ok(known.position);
            }
        }
        let text = format!("no record of the job {job} is known in a pipeline");
        Err(status(Code::NotFound, text, "RECORD_NOT_FOUND", []))
    }

    async fn stored(&self, position: &Position) -> Result<Option<Record>, Status> {
        let stored = self.lookups.get(vec![position.clone()]).await;
        let stored = stored.map_err(|error| kafka_unavailable(&error))?;
        Ok(stored.into_iter().flatten().next().map(|stored| stored.record))
    }

    async fn outcome_in(
        &self,
        viewer: &Viewer,
        number: u16,
        pipeline: &Pipeline,
        id: JobId,
    ) -> Result<v1::JobOutcome, Status> {
        let unknown = |reason: String, known: Option<&Known>| v1::JobOutcome {
            pipeline: pipeline.name.to_string(),
            state: State::Unknown.into(),
            reason,
            position: known.map(|known| (&known.position).into()),
            as_of: Some(to_timestamp(self.clock.now())),
            ..v1::JobOutcome::default()
        };
        if !self.outcomes.is_enabled() {
            return Ok(unknown("dlq_inspector.max_job_outcomes is 0".to_owned(), None));
        }
        let Some(since) = self.outcomes.since() else {
            return Ok(unknown(
                "the inspector has not read any topics yet".to_owned(),
                None,
            ));
        };
        // The last copy that was known before the table contained everything.
        let mut settled: Option<Option<Known>> = None;
        for _ in 0..MAX_EXAMINED {
            let known = self.outcomes.find(number, id);
            let is_settled = settled.as_ref() == Some(&known);
            let reason = match &known {
                None => format!(
                    "no record of the job is known: none was written since {since}, retention has removed it, or \
                     newer jobs have taken its place (dlq_inspector.max_job_outcomes)"
                ),
                Some(known) if known.is_ambiguous => {
                    let reason = format!("several records name this job, such as {}", known.position);
                    return Ok(unknown(reason, Some(known)));
                }
                Some(known) => {
                    let position = self.newest(&known.position);
                    match self.examine(viewer, pipeline, id, &position, is_settled).await? {
                        Evidence::Outcome(outcome) => return Ok(*outcome),
                        Evidence::Nothing(reason) => reason,
                    }
                }
            };
            if is_settled {
                return Ok(unknown(reason, known.as_ref()));
            }
            let outcomes = self.outcomes.clone();
            let caught_up = self.outcomes.ask(move || outcomes.catch_up(number)).await;
            if let Err(reason) = caught_up.map_err(failed)? {
                return Ok(unknown(reason, known.as_ref()));
            }
            settled = Some(known);
        }
        Ok(unknown(
            "its records move on too fast; ask again".to_owned(),
            None,
        ))
    }

    /// What a known copy proves. `is_settled`: a moment ago, no later copy existed.
    async fn examine(
        &self,
        viewer: &Viewer,
        pipeline: &Pipeline,
        id: JobId,
        position: &Position,
        is_settled: bool,
    ) -> Result<Evidence, Status> {
        let now = self.clock.now();
        let found = self.stored(position).await?.and_then(|record| {
            let (location, record) = located(pipeline, record)?;
            let copy = JobCopy::read(pipeline, location, &record)?;
            (copy.id == id).then_some((location, record, copy))
        });
        let Some((location, record, copy)) = found else {
            return Ok(Evidence::Nothing(format!(
                "{position} is not in Kafka any more: retention has removed it, or its topic was created again"
            )));
        };
        let (mut discarded, mut reason) = (false, String::new());
        let state = match location {
            Location::Topic(TopicRole::Output) => State::Succeeded,
            // Also an index that does not know a redrive yet: then, a later copy exists.
            Location::Topic(TopicRole::DeadLetter) if !is_settled => {
                return Ok(Evidence::Nothing(String::new()));
            }
            Location::Topic(TopicRole::DeadLetter) => {
                let at = position.clone();
                let letter = self
                    .pool
                    .query(move |connection| index::get(connection, &at))
                    .await;
                let letter = letter?;
                let letter = letter.filter(|letter| letter.content == content_hash(&record));
                match letter.map(|letter| letter.state) {
                    None => {
                        return Ok(Evidence::Nothing(format!(
                            "the index does not contain the dead letter {position} yet, so it may have been redriven"
                        )));
                    }
                    Some(ledger::State::Redriven) => {
                        return Ok(Evidence::Nothing(format!(
                            "the dead letter {position} was redriven, and no later record of the job is known in the pipeline"
                        )));
                    }
                    state => discarded = state == Some(ledger::State::Discarded),
                }
                State::Dead
            }
            Location::Scheduler if is_settled => State::Waiting,
            Location::Scheduler => return Ok(Evidence::Nothing(String::new())),
            // An operator may have had it acted on, before its tier gets there.
            Location::Topic(TopicRole::Tier(_)) if !is_settled => {
                return Ok(Evidence::Nothing(String::new()));
            }
            Location::Topic(TopicRole::Tier(_)) if self.moved(position).is_some() => {
                return Ok(Evidence::Nothing(format!(
                    "{position} was retried, moved or edited by hand, and no later record of the job is known"
                )));
            }
            Location::Topic(role) => {
                let progress = self.progress(pipeline, role, position).await?;
                let is_paused = self.outcomes.is_paused(&pipeline.name);
                match judge(pipeline, role, position, progress, is_paused) {
                    Ok((state, missing)) => {
                        missing.clone_into(&mut reason);
                        state
                    }
                    Err(reason) => return Ok(Evidence::Nothing(reason)),
                }
            }
        };
        let mask = viewer.mask(&pipeline.dead_letter_topic());
        let facts = Visible::of(&record, &mask).facts(&record, false, now);
        let has_failed = matches!(state, State::Waiting | State::Dead);
        let text = |text: Option<String>| text.filter(|_| has_failed).unwrap_or_default();
        let is_waiting = state == State::Waiting;
        let due = copy.due.filter(|_| is_waiting);
        let place = is_waiting.then(|| location.to_string());
        Ok(Evidence::Outcome(Box::new(v1::JobOutcome {
            pipeline: pipeline.name.to_string(),
            state: state.into(),
            reason,
            position: Some(position.into()),
            attempts: copy.stage.attempts.into(),
            due_at: due.and_then(time_of_record),
            place: place.unwrap_or_default(),
            error_class: text(facts.class),
            error_code: text(facts.code),
            time: facts.written.and_then(time_of_record),
            as_of: Some(to_timestamp(now)),
            discarded,
        })))
    }

    /// Where a copy is now that operators may have had edited. Edited copies are equal to those before in the table, which is read in any order.
    fn newest(&self, position: &Position) -> Position {
        let mut newest = position.clone();
        // A record of a tier is written behind itself, so this ends; but the topic is not only written by tiers.
        for _ in 0..MAX_EDITS {
            let Some(written) = self.moved(&newest).and_then(|done| done.written.clone()) else {
                break;
            };
            newest = written.into();
        }
        newest
    }

    /// The outcome of an act with which a record at a position was written elsewhere.
    fn moved(&self, position: &Position) -> Option<Arc<v1::WaitingDone>> {
        let actions = self.requests.replica.state()?;
        let id = self.outcomes.topic_id(&position.topic);
        let ids = id
            .map(|id| (position.topic.to_string(), id))
            .into_iter()
            .collect();
        actions.moved(position, &ids).cloned()
    }

    /// How far the group is that reads the topic of a copy. Only whether a worker is running matters.
    async fn progress(
        &self,
        pipeline: &Pipeline,
        role: TopicRole,
        position: &Position,
    ) -> Result<Progress, Status> {
        let group = pipeline
            .reading_group(role, &self.kafka.id_prefix)
            .unwrap_or_default();
        let needs_members = matches!(role, TopicRole::Source | TopicRole::Due);
        let (outcomes, position) = (self.outcomes.clone(), position.clone());
        let asked = self
            .outcomes
            .ask(move || outcomes.progress(&group, &position, needs_members));
        asked.await.map_err(failed)
    }
}

/// What a copy proves that a group reads, and what is missing until it goes on; or why it proves nothing.
fn judge(
    pipeline: &Pipeline,
    role: TopicRole,
    position: &Position,
    progress: Progress,
    is_paused: Option<bool>,
) -> Result<(State, &'static str), String> {
    if !progress.is_unread {
        let lost = match pipeline.output.is_none() || pipeline.drops_results {
            true => "the job has succeeded without a result",
            false => "its result lacks the header job-id",
        };
        return Err(format!(
            "{position} is complete and no later record is known: {lost}, or retention has removed what follows"
        ));
    }
    let in_doubt = |reason: &str| Err(format!("it is in {position}, and {reason}"));
    match (role, progress.has_members, is_paused) {
        (TopicRole::Tier(_), ..) => Ok((State::Waiting, "")),
        (_, None, _) => in_doubt("Kafka does not tell whether workers of the pipeline are running"),
        (_, Some(true), None) => in_doubt("the inspector does not know yet whether the pipeline is paused"),
        (_, Some(true), Some(false)) => Ok((State::Running, "")),
        (TopicRole::Due, ..) => Ok((State::Waiting, "")),
        (_, Some(true), Some(true)) => Ok((
            State::Dispatched,
            "the pipeline is paused: only an attempt that had begun before goes on",
        )),
        (_, Some(false), _) if progress.has_begun => {
            Ok((State::Dispatched, "no worker of the pipeline is running"))
        }
        (_, Some(false), _) => in_doubt(
            "no worker of the pipeline is running or has completed anything there; a worker with another group is not seen",
        ),
    }
}

/// Where a record is, unwrapped if it is a command for the scheduler.
fn located(pipeline: &Pipeline, record: Record) -> Option<(Location, Record)> {
    let topic: &Arc<str> = &record.position.topic;
    if pipeline.long_waits.as_ref() == Some(topic) {
        return Some((Location::Scheduler, long_wait::unwrap(&pipeline.name, &record)?));
    }
    let mut topics = pipeline.topics().into_iter();
    let role = match topics.find(|(of, _)| of == topic) {
        Some((_, role)) => role,
        // That of a retired pipeline.
        None if *topic == pipeline.source => TopicRole::Source,
        // Its settings were changed.
        None => match parse_retry_topic(topic)? {
            (name, tier) if *name == *pipeline.name => tier.map_or(TopicRole::Due, TopicRole::Tier),
            _ => return None,
        },
    };
    Some((Location::Topic(role), record))
}

/// Whether a record, or the one in a command for the scheduler, names this job.
fn is_of_job(record: &Record, job: JobId) -> bool {
    let names = |record: &Record| job_id(record) == Some(job);
    names(record) || long_wait::unwrap_any(record).is_some_and(|(_, waiting)| names(&waiting))
}

/// As for a trace: positions tell where a record comes from.
fn check_mask(viewer: &Viewer, topic: &str) -> Result<(), Status> {
    let mask = viewer.mask(topic);
    match mask.hides_origin() || mask.hides_job() {
        true => viewer.require_unmasked(topic),
        false => Ok(()),
    }
}

/// The id of a job in this field.
pub(super) fn job_of(field: &str, id: &str) -> Result<JobId, Status> {
    id.parse()
        .map_err(|error| invalid(field, format!("`{}` {error}", bounded(id)), "ID_INVALID", []))
}

fn failed(error: AskError) -> Status {
    match error {
        AskError::Busy => too_many_scans(),
        AskError::Ending => shutting_down(),
        AskError::Kafka(error) => kafka_unavailable(&error),
    }
}

#[cfg(test)]
mod tests {
    use redeliver_core::HumanDuration;
    use redeliver_testkit::record_at;

    use super::*;

    #[test]
    fn only_offsets_prove_running() {
        let pipeline = Pipeline::new("jobs");
        let position = record_at("jobs", 0, 7).position;
        let judged = |role, is_unread, has_begun, has_members, is_paused| {
            let progress = Progress {
                is_unread,
                has_begun,
                has_members,
            };
            judge(&pipeline, role, &position, progress, is_paused)
        };
        let tier = TopicRole::Tier(HumanDuration::from_secs(5));
        for (role, is_unread, has_begun, has_members, is_paused, expected) in [
            (TopicRole::Source, true, true, true, false, Some(State::Running)),
            (TopicRole::Source, true, false, true, false, Some(State::Running)),
            (
                TopicRole::Source,
                true,
                true,
                false,
                false,
                Some(State::Dispatched),
            ),
            // Nobody has committed anything: a worker with another group may process it.
            (TopicRole::Source, true, false, false, false, None),
            (TopicRole::Source, false, true, true, false, None),
            // Paused workers stay in the group.
            (TopicRole::Source, true, true, true, true, Some(State::Dispatched)),
            (TopicRole::Due, true, true, true, false, Some(State::Running)),
            (TopicRole::Due, true, true, true, true, Some(State::Waiting)),
            (TopicRole::Due, true, false, false, false, Some(State::Waiting)),
            (TopicRole::Due, false, true, true, false, None),
            (tier, true, false, false, true, Some(State::Waiting)),
            (tier, false, true, false, false, None),
        ] {
            let found = judged(role, is_unread, has_begun, Some(has_members), Some(is_paused));
            let found = found.ok().map(|(state, _)| state);
            let case = format!("{role:?} {is_unread} {has_begun} {has_members} {is_paused}");
            assert_eq!(found, expected, "{case}");
        }
        let silent = judged(TopicRole::Source, true, true, None, Some(false));
        assert!(silent.unwrap_err().contains("does not tell"));
        let unknown = judged(TopicRole::Source, true, true, Some(true), None);
        assert!(unknown.unwrap_err().contains("does not know yet"));
    }
}
