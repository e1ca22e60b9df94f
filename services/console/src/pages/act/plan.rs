//! Plans a redrive, a discard or a restore of dead letters. A plan does nothing until it is started.

use askama::filters::Safe;
use redeliver_client::Timestamp;
use redeliver_client::convert::{from_duration, to_duration};
use redeliver_client::messages::{
    DeadLetterStats, GetRedriveRequest, PlanRedriveRequest, RedriveKind, Removal, TopicStats,
};
use redeliver_core::HumanDuration;
use serde::Deserialize;

use super::{Act, Fact, Sheet, count, fact, redrive, when};
use crate::access::Need;
use crate::backend::Backend;
use crate::command::Command;
use crate::form::{self, Field, Fields, parsed};
use crate::html;
use crate::page::{Frame, Part, Problem, address, literal, segment};

/// The most dead letters of a plan.
const MOST: u64 = 100_000;

#[derive(Clone, Copy, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    #[default]
    Redrive,
    Discard,
    Restore,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::Discard => "discard",
            Self::Restore => "restore",
        }
    }

    /// The state of the dead letters that it takes.
    fn takes(self) -> &'static str {
        match self {
            Self::Redrive | Self::Discard => "OPEN",
            Self::Restore => "DISCARDED",
        }
    }
}

impl From<Kind> for RedriveKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Redrive => Self::Redrive,
            Kind::Discard => Self::Discard,
            Kind::Restore => Self::Restore,
        }
    }
}

/// The form for the dead letters that a parameter selects.
pub(crate) fn link(kind: Kind, by: &str, value: &str) -> String {
    let (by, value) = match (by, value) {
        ("filter", "") => ("all", "1"),
        selected => selected,
    };
    address("/act/plan", &[("kind", kind.name()), (by, value)])
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Plan {
    kind: Kind,
    // What it takes: one of these.
    group: String,
    filter: String,
    id: String,
    retry_of: String,
    all: String,
    // How.
    reason: String,
    rate: String,
    max_returned: String,
    observe: String,
    all_at_once: String,
    destination: String,
    force: String,
}

/// What a plan takes.
enum Selection<'p> {
    /// Dead letters that match: the option of the command, its value, and the filter.
    Matching(&'static str, &'p str, String),
    /// Those that a job has not done.
    RetryOf(&'p str),
}

impl Fields for Plan {}

impl Plan {
    fn selection(&self) -> Part<Selection<'_>> {
        use Selection::{Matching, RetryOf};
        let of = |field: &str, value: &str| format!("{field} = {}", literal(value));
        let all = [&self.group, &self.filter, &self.id, &self.retry_of, &self.all].map(|text| text.trim());
        match all {
            [group, "", "", "", ""] if !group.is_empty() => {
                Ok(Matching("--group", group, of("group", group)))
            }
            ["", filter, "", "", ""] if !filter.is_empty() => {
                Ok(Matching("--filter", filter, filter.to_owned()))
            }
            ["", "", id, "", ""] if !id.is_empty() => Ok(Matching("--id", id, of("id", id))),
            ["", "", "", job, ""] if !job.is_empty() => Ok(RetryOf(job)),
            ["", "", "", "", all] if !all.is_empty() => Ok(Matching("", "", String::new())),
            _ => Err(Problem::invalid(
                "Exactly one of `group`, `filter`, `id`, `retry_of` and `all` must be set.",
            )),
        }
    }

    fn request(&self, request_id: &str) -> Part<PlanRedriveRequest> {
        let observe = parsed::<HumanDuration>("observe", &self.observe, "a duration, such as 2m")?;
        Ok(PlanRedriveRequest {
            kind: RedriveKind::from(self.kind).into(),
            filter: self.filter.trim().to_owned(),
            all: !self.all.is_empty(),
            ids: Some(self.id.trim().to_owned())
                .filter(|id| !id.is_empty())
                .into_iter()
                .collect(),
            group: self.group.trim().to_owned(),
            retry_of: self.retry_of.trim().to_owned(),
            destination: self.destination.trim().to_owned(),
            reason: form::reason(&self.reason)?.to_owned(),
            request_id: request_id.to_owned(),
            rate_per_second: parsed("rate", &self.rate, "a whole number per second, or empty")?.unwrap_or(0),
            all_at_once: !self.all_at_once.is_empty(),
            max_returned_share: parsed(
                "max_returned",
                &self.max_returned,
                "a number from 0 to 1, or empty",
            )?,
            observe: observe.map(to_duration),
            force: !self.force.is_empty(),
            ..PlanRedriveRequest::default()
        })
    }

    fn command(&self, selection: &Selection) -> Command {
        let command = Command::new(&format!("dlq {}", self.kind.name()));
        let command = match selection {
            Selection::Matching("", ..) => command.flag("--all", true),
            Selection::Matching(option, value, _) => command.option(option, value),
            Selection::RetryOf(job) => command.option("--retry-of", job),
        };
        command
            .option("--rate", &self.rate)
            .option("--max-returned", &self.max_returned)
            .option("--observe", &self.observe)
            .option("--destination", &self.destination)
            .flag("--all-at-once", !self.all_at_once.is_empty())
            .flag("--force", !self.force.is_empty())
            .option("--reason", &self.reason)
            .flag("--plan", true)
    }

    fn back(&self, selection: &Selection) -> String {
        match selection {
            Selection::Matching("--group", group, _) => segment("/groups", group),
            Selection::Matching("--id", id, _) => {
                let position = crate::pages::trace::position(id);
                crate::pages::letters::link(position.as_ref())
            }
            Selection::Matching(_, _, filter) => address("/letters", &[("filter", filter)]),
            Selection::RetryOf(job) => segment("/redrives", job),
        }
    }
}

impl Act for Plan {
    const SECTION: &'static str = "/redrives";

    async fn sheet(&self, backend: &Backend, frame: &Frame) -> Part<Sheet> {
        let selection = self.selection()?;
        let mut facts = Vec::new();
        let mut warnings = Vec::new();
        let taken = match &selection {
            Selection::Matching(_, _, filter) => {
                let state = self.kind.takes();
                let filter = match filter.as_str() {
                    "" => format!("state = {state}"),
                    filter => format!("({filter}) AND state = {state}"),
                };
                facts.push(fact("Selected", &filter));
                let stats = backend.dead_letters().stats(&filter).await?;
                let taken = stats.topics.iter().map(|topic| topic.total).sum();
                facts.extend(topics(&stats));
                // A restore only changes states: no record has to be written before Kafka removes it.
                if self.kind != Kind::Restore {
                    facts.push(retention(&stats, frame));
                }
                warnings.extend(crate::page::gaps(stats.completeness.as_ref(), frame.now));
                taken
            }
            Selection::RetryOf(job) => {
                let request = GetRedriveRequest {
                    id: (*job).to_owned(),
                };
                let job = backend.redrives().get(request).await?;
                facts.push(fact("Selected", format!("what {} has not done", job.id)));
                u64::from(job.total - job.done.min(job.total))
            }
        };
        if taken > MOST {
            warnings.push(format!(
                "A plan has at most {}: this one takes the oldest.",
                html::number(MOST)
            ));
        }
        let letters = count(taken, "dead letter");
        facts.insert(0, fact("Dead letters", &letters));
        let name = self.kind.name();
        let mut fields = vec![
            Field::hidden("kind", name),
            Field::hidden("group", &self.group),
            Field::hidden("filter", &self.filter),
            Field::hidden("id", &self.id),
            Field::hidden("retry_of", &self.retry_of),
            Field::hidden("all", &self.all),
            Field::reason(&self.reason),
            Field::line("rate", "At most per second", &self.rate).help("Empty: as fast as possible."),
        ];
        if self.kind == Kind::Redrive {
            fields.extend([
                Field::line(
                    "max_returned",
                    "Pause if a larger share comes back",
                    &self.max_returned,
                )
                .help("From 0 to 1; empty: 0.2. With 1, it never pauses, and there are no first batches."),
                Field::line("observe", "Wait for what comes back", &self.observe)
                    .help("Such as 2m; empty: the delays of the pipeline and 30 s."),
                Field::check(
                    "all_at_once",
                    "All at once, instead of 10, then 100, then the rest",
                    &self.all_at_once,
                ),
                Field::line("destination", "Destination", &self.destination)
                    .help("A topic; empty: the pipeline that gave up on the record."),
                Field::check("force", "Also those that came back too often", &self.force),
            ]);
        }
        Ok(Sheet {
            facts,
            warnings,
            fields,
            ..Sheet::new(
                // Of which topics is known when the job is planned.
                Need::operate([]),
                format!("Plan a {name}"),
                format!("Plan the {name} of {letters}"),
                self.command(&selection),
                self.back(&selection),
            )
        })
    }

    async fn run(&self, backend: &Backend, request_id: &str) -> Part<Option<String>> {
        self.selection()?;
        let job = backend.redrives().plan(self.request(request_id)?).await?;
        Ok(Some(redrive::link(&job.id, redrive::Verb::Start)))
    }
}

/// The topics that have dead letters.
fn counts(stats: &DeadLetterStats) -> impl Iterator<Item = &TopicStats> + Clone {
    stats.topics.iter().filter(|topic| topic.total > 0)
}

fn topics(stats: &DeadLetterStats) -> Option<Fact> {
    let topics = counts(stats).map(|topic| format!("{} ({})", topic.topic, html::number(topic.total)));
    let topics: Vec<_> = topics.collect();
    (!topics.is_empty()).then(|| fact("In", topics.join(", ")))
}

/// When Kafka may remove dead letters.
pub(super) fn retention(stats: &DeadLetterStats, frame: &Frame) -> Fact {
    let counts = counts(stats);
    let remaining = |duration: prost_types::Duration| from_duration(&duration).map(HumanDuration::as_millis);
    let first = counts
        .clone()
        .filter_map(|topic| topic.until_removal.and_then(remaining))
        .min()
        .map(|left| {
            let left = i64::try_from(left).unwrap_or(i64::MAX);
            Timestamp::from_millis(frame.now.as_millis().saturating_add(left))
        });
    let removals: Vec<Removal> = counts.map(TopicStats::removal).collect();
    let retention = match first {
        Some(first) => Safe(format!("Kafka may remove the first {}", when(first, frame))),
        None if removals.contains(&Removal::BySize) => {
            html::text("Kafka removes the oldest when a partition is too large, at an unknown time")
        }
        None if !removals.is_empty() && removals.iter().all(|removal| *removal == Removal::Never) => {
            html::text("Kafka does not remove them")
        }
        None => html::text("not known"),
    };
    ("Retention", retention)
}
