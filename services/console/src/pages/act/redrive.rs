//! Starts, pauses, resumes and cancels a redrive, and changes its rate.

use askama::filters::Safe;
use redeliver_client::convert::from_duration;
use redeliver_client::messages::{
    ChangeRedriveRequest, GetRedriveRequest, HeaderChangeKind, HeaderValue, Redrive, RedriveCount,
    RedriveKind, RedriveOutcome, RedriveSample, RedriveState, SetRedriveRateRequest,
};
use redeliver_runtime::config::Verb as ScopeVerb;
use serde::Deserialize;

use super::{Act, Fact, Sample, Sheet, accept_repeated, by, count, fact, plan, seen, shown};
use crate::access::Need;
use crate::backend::Backend;
use crate::command::Command;
use crate::form::{Field, Fields, parsed};
use crate::html;
use crate::page::{Button, Frame, Part, Problem, address, literal, segment};

#[derive(Clone, Copy, Default, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verb {
    #[default]
    Start,
    Pause,
    Resume,
    Cancel,
    Rate,
}

impl Verb {
    fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Cancel => "cancel",
            Self::Rate => "rate",
        }
    }
}

/// Stands for a topic that the viewer may not see.
const HIDDEN: &str = "<hidden>";

pub(crate) fn link(id: &str, verb: Verb) -> String {
    address("/act/redrive", &[("id", id), ("verb", verb.name())])
}

/// What each change of a job needs, and a job for the rest of it, as far as the viewer may know its topics.
pub(super) fn needs(job: &Redrive) -> Vec<Need> {
    let topics = job.sources.iter().chain(&job.destinations);
    let topics = topics.map(|of| of.topic.as_str());
    Need::operate(topics.filter(|topic| *topic != HIDDEN))
}

/// What this change of a job needs. An edit is written only for those who may edit.
fn needs_to(verb: Verb, job: &Redrive) -> Vec<Need> {
    let mut needs = needs(job);
    if !job.edited.is_empty() && matches!(verb, Verb::Start | Verb::Resume) {
        let sources = job.sources.iter().map(|of| of.topic.as_str());
        needs.extend(sources.map(|topic| Need::dead_letters(ScopeVerb::Edit, topic)));
    }
    needs
}

/// What can be done with a job now.
pub(crate) fn buttons(job: &Redrive) -> Vec<Button> {
    use RedriveState::{Paused, Planned, Running};
    let button = |label: &str, verb| Button::new(label, link(&job.id, verb)).needs(needs_to(verb, job));
    match job.state() {
        Planned => vec![
            button("Start", Verb::Start).next(),
            button("Cancel", Verb::Cancel),
        ],
        Running => vec![
            button("Pause", Verb::Pause),
            button("Rate", Verb::Rate),
            button("Cancel", Verb::Cancel),
        ],
        Paused => vec![
            button("Resume", Verb::Resume).next(),
            button("Rate", Verb::Rate),
            button("Cancel", Verb::Cancel),
        ],
        // An edited dead letter has to be edited again.
        _ if job.done < job.total && job.edited.is_empty() => {
            let rest = u64::from(job.total - job.done);
            let label = format!("Try {} again", count(rest, "dead letter"));
            let kind = match job.kind() {
                RedriveKind::Discard => plan::Kind::Discard,
                RedriveKind::Restore => plan::Kind::Restore,
                RedriveKind::Redrive | RedriveKind::Unspecified => plan::Kind::Redrive,
            };
            vec![Button::new(label, plan::link(kind, "retry_of", &job.id)).needs(needs(job))]
        }
        _ => Vec::new(),
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Change {
    id: String,
    verb: Verb,
    revision: String,
    rate: String,
}

impl Fields for Change {}

impl Change {
    async fn job(&self, backend: &Backend) -> Part<Redrive> {
        let request = GetRedriveRequest { id: self.id.clone() };
        Ok(backend.redrives().get(request).await?)
    }

    /// What a planned redrive would write.
    async fn samples(&self, backend: &Backend, job: &Redrive) -> Part<Vec<Sample>> {
        if self.verb != Verb::Start || job.kind() != RedriveKind::Redrive {
            return Ok(Vec::new());
        }
        let request = GetRedriveRequest { id: self.id.clone() };
        let preview = backend.redrives().preview(request).await?;
        Ok(preview.samples.into_iter().map(sample).collect())
    }

    /// When Kafka may remove open dead letters of the topics of a job. These may be others than those of the job, and older.
    async fn retention(&self, backend: &Backend, job: &Redrive, frame: &Frame) -> Part<Option<Fact>> {
        let topics = job.sources.iter().filter(|of| of.topic != HIDDEN);
        let topics: Vec<String> = topics
            .map(|of| format!("topic = {}", literal(&of.topic)))
            .collect();
        // A restore only changes states.
        let is_asked = self.verb == Verb::Start && job.kind() != RedriveKind::Restore;
        if !is_asked || topics.is_empty() {
            return Ok(None);
        }
        let filter = format!("state = OPEN AND ({})", topics.join(" OR "));
        let stats = backend.dead_letters().stats(&filter).await?;
        Ok(Some(plan::retention(&stats, frame)))
    }

    fn rate(&self) -> Part<u32> {
        let rate = parsed(
            "rate",
            &self.rate,
            "a whole number per second; 0 is as fast as possible",
        )?;
        rate.ok_or_else(|| Problem::invalid("`rate` is required; 0 is as fast as possible."))
    }

    /// Whether a job is as the change wants it.
    fn is_wanted(&self, job: &Redrive) -> bool {
        match self.verb {
            Verb::Start => !matches!(job.state(), RedriveState::Planned | RedriveState::Cancelled),
            Verb::Pause => job.state() == RedriveState::Paused,
            Verb::Resume => job.state() != RedriveState::Paused && job.state() != RedriveState::Cancelled,
            Verb::Cancel => job.state() == RedriveState::Cancelled,
            Verb::Rate => self.rate().is_ok_and(|rate| rate == job.rate_per_second),
        }
    }
}

impl Act for Change {
    const SECTION: &'static str = "/redrives";

    fn forget(&mut self) {
        self.revision.clear();
    }

    async fn sheet(&self, backend: &Backend, frame: &Frame) -> Part<Sheet> {
        let job = self.job(backend).await?;
        let revision = shown(&self.revision, job.revision);
        let mut facts = described(&job, frame);
        let samples = self.samples(backend, &job).await.unwrap_or_else(|problem| {
            facts.push(fact("Samples", format!("not known: {}", problem.detail)));
            Vec::new()
        });
        let retention = self.retention(backend, &job, frame).await;
        facts.extend(retention.unwrap_or_else(|problem| {
            let unknown = format!("not known: {}", problem.detail);
            Some(fact("Retention", unknown))
        }));
        let kind = job.kind().name().unwrap_or_default();
        let pending = count(job.pending.into(), "dead letter");
        let (title, button) = match self.verb {
            Verb::Start => (
                format!("Start the {kind}"),
                format!("{} {pending}", capital(&kind)),
            ),
            Verb::Pause => (
                format!("Pause the {kind}"),
                format!("Pause; {pending} will be pending"),
            ),
            Verb::Resume => (format!("Resume the {kind}"), format!("Go on with {pending}")),
            Verb::Cancel => (
                format!("Cancel the {kind}"),
                format!("Cancel for good; {pending} will not be done"),
            ),
            Verb::Rate => (format!("Rate of the {kind}"), "Set the rate".to_owned()),
        };
        let mut fields = vec![
            Field::hidden("id", &self.id),
            Field::hidden("verb", self.verb.name()),
            Field::hidden("revision", &revision),
        ];
        let mut command = Command::new(&format!("dlq redrives {}", self.verb.name()))
            .option("--expected-revision", &revision)
            .argument(&job.id);
        if self.verb == Verb::Rate {
            let rate = match self.rate.as_str() {
                "" => job.rate_per_second.to_string(),
                rate => rate.to_owned(),
            };
            command = command.argument(&rate);
            let field = Field::line("rate", "At most per second", rate);
            fields.push(field.help("0: as fast as possible.").required());
        }
        Ok(Sheet {
            facts,
            samples,
            warnings: job.warnings.clone(),
            fields,
            ..Sheet::new(
                needs_to(self.verb, &job),
                title,
                button,
                command,
                segment("/redrives", &job.id),
            )
        })
    }

    async fn run(&self, backend: &Backend, _: &str) -> Part<Option<String>> {
        let client = backend.redrives();
        let expected_revision = seen(&self.revision)?;
        let change = ChangeRedriveRequest {
            id: self.id.clone(),
            expected_revision,
            start_at: None,
        };
        let changed = match self.verb {
            Verb::Start => client.start(change).await,
            Verb::Pause => client.pause(change).await,
            Verb::Resume => client.resume(change).await,
            Verb::Cancel => client.cancel(change).await,
            Verb::Rate => {
                let change = SetRedriveRateRequest {
                    id: self.id.clone(),
                    expected_revision,
                    rate_per_second: self.rate()?,
                };
                client.set_rate(change).await
            }
        };
        if let Err(error) = changed {
            let found = async {
                let job = self.job(backend).await?;
                Ok((job.revision, self.is_wanted(&job)))
            };
            accept_repeated(error, expected_revision, found).await?;
        }
        Ok(Some(segment("/redrives", &self.id)))
    }
}

/// What a job does, before it does it.
fn described(job: &Redrive, frame: &Frame) -> Vec<Fact> {
    let topics = |counts: &[RedriveCount]| {
        let counts = counts
            .iter()
            .map(|of| format!("{} ({})", of.topic, html::number(of.count)));
        counts.collect::<Vec<_>>().join(", ")
    };
    let mut facts = vec![
        fact("Job", &job.id),
        fact("State", job.state().name().unwrap_or_default()),
        fact(
            "Dead letters",
            format!(
                "{} of {} pending",
                html::number(job.pending),
                html::number(job.total)
            ),
        ),
        ("Planned", by(&job.created_by, job.created_at, &job.reason, frame)),
        fact("From", topics(&job.sources)),
    ];
    if job.has_more {
        facts.push(fact(
            "Not planned",
            "more match than a plan can have: it has the oldest",
        ));
    }
    for refused in &job.refused {
        let reason = refused.reason().name().unwrap_or_default();
        let refused = format!(
            "{} ({reason}), such as {}",
            html::number(refused.count),
            refused.sample
        );
        facts.push(fact("Not planned", refused));
    }
    if job.kind() == RedriveKind::Redrive {
        let batches = match (job.all_at_once, job.max_returned_share) {
            (_, 1.0..) => "all at once, and it never pauses".to_owned(),
            (true, share) => format!("all at once; auto-pause if more than {share} come back"),
            (false, share) => {
                format!("10, then 100, then the rest; auto-pause if more than {share} come back")
            }
        };
        let observe = job.observe.as_ref().and_then(from_duration);
        let observe = observe.map_or_else(String::new, |observe| format!(", waits {observe} for these"));
        let headers = match job.edited.as_slice() {
            [] => "those of the failure are removed".to_owned(),
            edited => format!(
                "those of the failure are removed, redrive-of is added; edited: {}",
                edited.join(", ")
            ),
        };
        facts.extend([
            fact("To", topics(&job.destinations)),
            fact("Batches", batches + &observe),
            fact(
                "Headers",
                headers + "; retry-count is 0; redrive-id, redrive-count and redrive-time are added",
            ),
        ]);
    }
    let rate = match job.rate_per_second {
        0 => "as fast as possible".to_owned(),
        rate => format!("{rate}/s"),
    };
    facts.push(fact("Rate", rate));
    facts
}

fn sample(sample: RedriveSample) -> Sample {
    let RedriveSample { id, destination, .. } = &sample;
    let title = match sample.outcome() {
        RedriveOutcome::Done => format!("{id} → {destination}"),
        skipped => format!("{id} would be skipped: {}", skipped.name().unwrap_or_default()),
    };
    let note = match (sample.payload_withheld, sample.headers_truncated) {
        (0, false) => "",
        (0, true) => "More headers are not shown.",
        _ => {
            "Headers are withheld: this needs the scope dead-letters:payload, and if they were edited dead-letters:edit."
        }
    };
    let headers = sample.headers.into_iter().map(|header| {
        let before = values(&header.before);
        let after = match header.kind() {
            HeaderChangeKind::Kept => before.clone(),
            _ => values(&header.after),
        };
        let change = header.kind().name().unwrap_or_default();
        (header.name, change, Safe(before), Safe(after))
    });
    Sample {
        title,
        headers: headers.collect(),
        note,
    }
}

/// The values of a header, one per line.
fn values(values: &[HeaderValue]) -> String {
    let value = |value: &HeaderValue| {
        let rest = if value.truncated { "…" } else { "" };
        html::line(value.bytes.as_deref()).0 + rest
    };
    values.iter().map(value).collect::<Vec<_>>().join("<br>")
}

fn capital(text: &str) -> String {
    let mut letters = text.chars();
    let first = letters.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}
