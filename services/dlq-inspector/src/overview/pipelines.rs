//! The rows of pipelines in an overview.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use redeliver_core::pipeline::TopicRole;
use redeliver_core::{HumanDuration, Pipeline, Timestamp};
use redeliver_proto::convert::{time_of_record, to_duration, to_timestamp};
use redeliver_proto::v1;
use redeliver_service::control::value::{RateLimit, Run};
use redeliver_service::control::{ControlName, Snapshot};
use redeliver_service::queues::{Queue, Waiting, next_due};

use super::history::{Changes, History};
use super::survey::{Letters, Survey};
use crate::group_states::GroupState;
use crate::waiting::Place;

/// The pipelines of the configuration, by name.
#[derive(Debug)]
pub(crate) struct Pipelines {
    pub(crate) list: Vec<Pipeline>,
    /// Outputs of several pipelines.
    shared_outputs: BTreeSet<Arc<str>>,
    /// The topics that they need.
    pub(crate) needed: BTreeSet<Arc<str>>,
}

impl Pipelines {
    pub(crate) fn new(mut list: Vec<Pipeline>) -> Self {
        list.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        let (mut outputs, mut shared_outputs) = (BTreeSet::new(), BTreeSet::new());
        for pipeline in &list {
            let own: BTreeSet<&Arc<str>> = pipeline.output.iter().chain(&pipeline.other_outputs).collect();
            let again = own
                .into_iter()
                .filter(|output| !outputs.insert((*output).clone()));
            shared_outputs.extend(again.cloned());
        }
        let topics = list.iter().flat_map(Pipeline::topics);
        Self {
            needed: topics.map(|(topic, _)| topic).collect(),
            list,
            shared_outputs,
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Pipeline> {
        let index = self.list.binary_search_by(|pipeline| (*pipeline.name).cmp(name));
        self.list.get(index.ok()?)
    }

    /// The pipeline with this dead-letter topic.
    pub(crate) fn of_letters(&self, topic: &str) -> Option<&Pipeline> {
        self.get(topic.strip_suffix("-dlq")?)
    }
}

/// A pipeline in an overview.
#[derive(Debug)]
pub(crate) struct PipelineRow {
    /// Who sees its dead letters sees it.
    pub(crate) letters: Arc<str>,
    pub(crate) message: v1::PipelineOverview,
}

/// The rows of all pipelines, in the order of their names. Redrives and problems are added for each caller.
pub(crate) fn rows(pipelines: &Pipelines, survey: &Survey, history: &History) -> Vec<PipelineRow> {
    let changes = history.changes(survey);
    let groups = GroupCounts::of(survey.letters.as_deref());
    pipelines
        .list
        .iter()
        .map(|pipeline| {
            let queues = survey.waiting.as_ref().map(|reading| {
                let queues = reading.queues.get(&pipeline.name);
                queues.map(Vec::as_slice).unwrap_or_default()
            });
            let waiting = places(pipeline, queues, survey);
            let next_due = survey.waiting.as_ref().and_then(|reading| {
                let waiting = queues.into_iter().flatten().map(|(_, waiting)| waiting);
                next_due(waiting, reading.at)
            });
            let letters = pipeline.dead_letter_topic();
            let topics = pipeline.topics().into_iter().map(|(topic, _)| topic);
            let missing = topics.filter(|topic| history.missing_since(survey, topic).is_some());
            let breaker = survey.breaker(&pipeline.name);
            let message = v1::PipelineOverview {
                pipeline: pipeline.name.to_string(),
                retired: pipeline.retired,
                lag: (!pipeline.retired).then(|| lag(queues)),
                rates: changes.map(|changes| rates(pipelines, pipeline, queues, &changes)),
                waiting,
                has_long_waits: pipeline.long_waits.is_some(),
                next_due: next_due.and_then(time_of_record),
                dead_letters: survey
                    .letters
                    .as_ref()
                    .map(|known| dead_letters(&letters, known, &groups)),
                run: Some(run_of_pipeline(survey.controls.as_deref(), &pipeline.name)),
                breaker: breaker.map_or(0, |breaker| breaker.state),
                missing_topics: missing.map(|topic| topic.to_string()).collect(),
                problem_count: 0,
                audit: survey.audits.get(&*pipeline.name).cloned(),
            };
            PipelineRow { letters, message }
        })
        .collect()
}

/// What the workers have not completed of the source. Unknown without a reading, or if the source does not exist.
fn lag(queues: Option<&[(Queue, Waiting)]>) -> v1::RecordCount {
    let source = queues.and_then(|queues| queues.iter().find(|(queue, _)| queue.role == TopicRole::Source));
    source.map_or_else(v1::RecordCount::default, |(_, waiting)| count(waiting))
}

fn count(waiting: &Waiting) -> v1::RecordCount {
    v1::RecordCount {
        records: Some(waiting.backlog.records),
        exact: waiting.backlog.is_exact,
        unreachable_partitions: u32::try_from(waiting.unreachable.len()).unwrap_or(u32::MAX),
    }
}

/// The due topic, and the tiers in the order of their delays.
fn places(
    pipeline: &Pipeline,
    queues: Option<&[(Queue, Waiting)]>,
    survey: &Survey,
) -> Vec<v1::WaitingOverview> {
    let mut found: BTreeMap<Option<HumanDuration>, Option<&Waiting>> = BTreeMap::new();
    // Without a reading, and without their topics, they are known from the configuration.
    if pipeline.needs_due_topic() {
        found.insert(None, None);
    }
    for tier in pipeline.policy.tiers() {
        found.insert(Some(*tier), None);
    }
    for (queue, waiting) in queues.into_iter().flatten() {
        match queue.role {
            TopicRole::Due => drop(found.insert(None, Some(waiting))),
            TopicRole::Tier(tier) => drop(found.insert(Some(tier), Some(waiting))),
            TopicRole::Source | TopicRole::Output | TopicRole::DeadLetter => {}
        }
    }
    let read_at = survey.waiting.as_ref().map(|reading| reading.at);
    let place = |(tier, waiting): (Option<HumanDuration>, Option<&Waiting>)| {
        let read = waiting.zip(read_at);
        v1::WaitingOverview {
            place: tier.map_or(Place::Due, Place::Tier).to_string(),
            waiting: Some(waiting.map_or_else(v1::RecordCount::default, count)),
            overdue: read
                .and_then(|(waiting, at)| waiting.due_at(at))
                .map(|overdue| overdue as u64),
            overdue_exact: waiting.is_some_and(|waiting| waiting.backlog.is_exact),
            next_due: read
                .and_then(|(waiting, at)| waiting.next_due(at))
                .and_then(time_of_record),
            run: tier.map(|tier| run_of_tier(survey.controls.as_deref(), &pipeline.name, tier)),
            configured: tier.map_or(pipeline.needs_due_topic(), |tier| {
                pipeline.policy.tiers().contains(&tier)
            }),
        }
    };
    found.into_iter().map(place).collect()
}

fn rates(
    pipelines: &Pipelines,
    pipeline: &Pipeline,
    queues: Option<&[(Queue, Waiting)]>,
    changes: &Changes<'_>,
) -> v1::PipelineRates {
    let outputs: BTreeSet<&Arc<str>> = pipeline.output.iter().chain(&pipeline.other_outputs).collect();
    let is_own = !outputs.is_empty() && outputs.is_disjoint(&pipelines.shared_outputs.iter().collect());
    let mut tiers: BTreeSet<Arc<str>> = pipeline
        .policy
        .tiers()
        .iter()
        .map(|tier| pipeline.tier_topic(*tier))
        .collect();
    let left = queues.into_iter().flatten();
    tiers.extend(
        left.filter(|(queue, _)| matches!(queue.role, TopicRole::Tier(_)))
            .map(|(queue, _)| queue.topic.clone()),
    );
    v1::PipelineRates {
        received: changes.rate([&pipeline.source]).filter(|_| !pipeline.retired),
        succeeded: changes.rate(outputs).filter(|_| is_own),
        retried: changes.rate(&tiers),
        dead: changes.rate([&pipeline.dead_letter_topic()]),
        window: Some(to_duration(HumanDuration::from(changes.window))),
    }
}

/// How many groups need attention, by topic.
struct GroupCounts<'l> {
    /// Regressed and new ones; `None` if unknown.
    by_topic: Option<BTreeMap<&'l str, (u32, u32)>>,
}

impl<'l> GroupCounts<'l> {
    fn of(letters: Option<&'l Letters>) -> Self {
        let groups = letters.and_then(|letters| letters.groups.as_ref());
        let by_topic = groups.map(|groups| {
            let mut counts: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
            for group in groups {
                let (regressed, new) = counts.entry(&group.topic).or_default();
                match group.state {
                    GroupState::Regressed => *regressed += 1,
                    _ => *new += 1,
                }
            }
            counts
        });
        Self { by_topic }
    }
}

fn dead_letters(topic: &Arc<str>, letters: &Letters, groups: &GroupCounts<'_>) -> v1::DeadLettersOverview {
    let open = letters.open.get(&**topic);
    let groups = groups.by_topic.as_ref();
    let groups = groups.map(|groups| groups.get(&**topic).copied().unwrap_or_default());
    v1::DeadLettersOverview {
        topic: topic.to_string(),
        open: letters.has_states.then(|| open.map_or(0, |open| open.count)),
        oldest: open.and_then(|open| time_of_record(open.oldest)),
        removed_from: open.and_then(|open| time_of_record(open.removed_from?)),
        regressed_groups: groups.map(|(regressed, _)| regressed),
        new_groups: groups.map(|(_, new)| new),
        running_redrives: None,
        paused_redrives: None,
        auto_paused_redrives: None,
        trend: letters
            .trends
            .get(&**topic)
            .cloned()
            .unwrap_or_else(|| vec![0; 24]),
    }
}

/// What an operator has paused, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Paused {
    pub(crate) control: ControlName,
    /// Who has paused it, and why. Not set for a value that this process cannot read.
    pub(crate) since: Option<Timestamp>,
    pub(crate) by: String,
    pub(crate) reason: String,
}

/// What pauses something that each of these controls pauses.
pub(crate) fn paused(controls: &Snapshot, names: impl IntoIterator<Item = ControlName>) -> Option<Paused> {
    let is_paused = |name: &ControlName| {
        let desired = controls.applied(name);
        desired.is_some_and(|desired| desired.run() == Some(Run::Paused))
    };
    let control = names.into_iter().find(is_paused)?;
    let value = controls.table.get(&control);
    Some(Paused {
        since: value.and_then(|value| value.changed_at),
        by: value.map_or_else(String::new, |value| value.changed_by.clone()),
        reason: value.map_or_else(String::new, |value| value.reason.clone()),
        control,
    })
}

fn run(controls: Option<&Snapshot>, names: Vec<ControlName>, per_second: Option<f64>) -> v1::RunOverview {
    let Some(controls) = controls else {
        return v1::RunOverview::default();
    };
    let Some(paused) = paused(controls, names) else {
        return v1::RunOverview {
            paused: Some(false),
            per_second,
            ..v1::RunOverview::default()
        };
    };
    v1::RunOverview {
        paused: Some(true),
        per_second,
        control: paused.control.to_string(),
        since: paused.since.map(to_timestamp),
        by: paused.by,
        reason: paused.reason,
    }
}

fn run_of_pipeline(controls: Option<&Snapshot>, pipeline: &str) -> v1::RunOverview {
    let rate = controls.and_then(|controls| controls.pipeline(pipeline).rate);
    run(
        controls,
        vec![ControlName::pipeline(pipeline)],
        rate.and_then(RateLimit::per_second),
    )
}

fn run_of_tier(controls: Option<&Snapshot>, pipeline: &str, tier: HumanDuration) -> v1::RunOverview {
    let rate = controls.and_then(|controls| controls.tier(pipeline, tier).rate);
    let names = vec![ControlName::tier(pipeline, tier), ControlName::WholeTier(tier)];
    run(controls, names, rate)
}
