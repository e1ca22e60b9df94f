//! `redeliver dlq groups` and `redeliver dlq group`: dead letters that fail for the same reason.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use redeliver_client::convert::to_timestamp;
use redeliver_client::messages::{
    AnnotateGroupRequest, ChangeGroupRequest, Group, GroupState, ListGroupsRequest, MuteGroupRequest,
};
use redeliver_client::{Code, DeadLetterClient, Timestamp};
use serde_json::{Map, json};

use super::completeness::CompleteArgs;
use super::{FilterArgs, open, read_answer};
use crate::connection::CliError;
use crate::output::{Column, Json, OutputArgs, Text as _, fields, object, print_answer, print_item};
use crate::times::future;

#[derive(Args)]
pub(super) struct GroupsArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// Only groups with a state or a note, but without dead letters
    #[arg(long, conflicts_with_all = ["filter", "since", "until", "expires_within", "sort"])]
    without_dead_letters: bool,
    /// Only groups in this state: open, resolved, muted or regressed; can be repeated
    #[arg(long = "state", value_name = "STATE", value_enum, hide_possible_values = true)]
    states: Vec<State>,
    /// Order: last-seen, first-seen (new groups first) or count (the largest first)
    #[arg(long, value_enum, default_value = "last-seen", hide_possible_values = true)]
    sort: Sort,
    /// Maximum number of groups
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    #[command(flatten)]
    complete: CompleteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum State {
    /// The default; also after a reopening or the end of a mute
    Open,
    /// The cause is fixed
    Resolved,
    /// Known and accepted
    Muted,
    /// Resolved, and a dead letter was written since
    Regressed,
}

#[derive(Clone, Copy, ValueEnum)]
enum Sort {
    /// Those with the last dead letters
    LastSeen,
    /// New groups
    FirstSeen,
    /// Those with the most dead letters
    Count,
}

#[derive(Args)]
pub(super) struct GroupArgs {
    #[command(subcommand)]
    verb: GroupVerb,
}

#[derive(Subcommand)]
enum GroupVerb {
    /// Show a group: template, state, counts and trend
    Show(ShowGroupArgs),
    /// Mark a group as resolved, until a new dead letter makes it regressed
    Resolve(ResolveArgs),
    /// Mute a group, so that it causes no alerts about groups
    Mute(MuteArgs),
    /// Set a group to open
    Reopen(ResolveArgs),
    /// Set the note of a group
    Note(NoteArgs),
}

#[derive(Args)]
struct ResolveArgs {
    /// Reason for the audit log, at most 1000 bytes
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    reason: String,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
struct MuteArgs {
    /// Reason for the audit log, at most 1000 bytes
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// End of the mute, such as 2d (from now) or 2026-11-30T08:00:00Z (default: none)
    #[arg(long, value_name = "TIME", value_parser = future)]
    until: Option<Timestamp>,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
struct NoteArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// Note, at most 2000 bytes; "" removes it
    #[arg(value_name = "TEXT")]
    text: String,
}

#[derive(Args)]
struct ChangeArgs {
    /// Group id of `redeliver dlq groups`, 16 hexadecimal digits
    #[arg(value_name = "ID")]
    id: String,
    /// Fail unless this is the current revision; 0: never changed
    #[arg(long, value_name = "N")]
    expected_revision: Option<u64>,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Args)]
struct ShowGroupArgs {
    /// Group id of `redeliver dlq groups`, 16 hexadecimal digits
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    complete: CompleteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl GroupArgs {
    pub(super) fn changes(&self) -> bool {
        !matches!(self.verb, GroupVerb::Show(_))
    }
}

pub(super) async fn list(client: &DeadLetterClient, args: &GroupsArgs) -> Result<ExitCode, CliError> {
    let order_by = match args.sort {
        _ if args.without_dead_letters => "",
        Sort::LastSeen => "last_dead_at desc",
        Sort::FirstSeen => "first_dead_at desc",
        Sort::Count => "count desc",
    };
    let (format, filter) = (args.output.format, args.filter.text()?);
    let listed = read_answer(args.limit, format, as_json, async |page_size, page_token| {
        let request = ListGroupsRequest {
            filter: filter.clone(),
            order_by: order_by.to_owned(),
            states: args.states.iter().map(|state| state.wanted().into()).collect(),
            without_dead_letters: args.without_dead_letters,
            page_size,
            page_token,
        };
        let page = client.groups(request).await?;
        Ok((page.groups, page.next_page_token, page.completeness))
    });
    let (pages, completeness) = listed.await?;
    print_answer(format, &COLUMNS, ("groups", &pages.items), as_json, &completeness);
    if pages.has_more {
        eprintln!(
            "more groups match; use --limit {} to show more",
            u64::from(args.limit) * 10
        );
    }
    Ok(args.complete.conclude(&completeness))
}

pub(super) async fn run(client: &DeadLetterClient, args: &GroupArgs) -> Result<ExitCode, CliError> {
    let (changed, args) = match &args.verb {
        GroupVerb::Show(args) => return show(client, args).await,
        GroupVerb::Resolve(args) => {
            let change = args.change.with_reason(&args.reason);
            (client.resolve_group(change).await, &args.change)
        }
        GroupVerb::Mute(args) => {
            let change = MuteGroupRequest {
                id: args.change.id.clone(),
                reason: args.reason.clone(),
                expected_revision: args.change.expected_revision,
                until: args.until.map(to_timestamp),
            };
            (client.mute_group(change).await, &args.change)
        }
        GroupVerb::Reopen(args) => {
            let change = args.change.with_reason(&args.reason);
            (client.reopen_group(change).await, &args.change)
        }
        GroupVerb::Note(args) => {
            let change = AnnotateGroupRequest {
                id: args.change.id.clone(),
                note: args.text.clone(),
                expected_revision: args.change.expected_revision,
            };
            (client.annotate_group(change).await, &args.change)
        }
    };
    let group = changed.map_err(|error| match error.code() {
        Some(Code::NotFound) => not_found(&args.id),
        _ => error.into(),
    })?;
    print_item(args.output.format, || as_text(&group), || as_json(&group));
    Ok(ExitCode::SUCCESS)
}

impl ChangeArgs {
    fn with_reason(&self, reason: &str) -> ChangeGroupRequest {
        ChangeGroupRequest {
            id: self.id.clone(),
            reason: reason.to_owned(),
            expected_revision: self.expected_revision,
        }
    }
}

impl State {
    fn wanted(self) -> GroupState {
        match self {
            Self::Open => GroupState::Open,
            Self::Resolved => GroupState::Resolved,
            Self::Muted => GroupState::Muted,
            Self::Regressed => GroupState::Regressed,
        }
    }
}

fn not_found(id: &str) -> CliError {
    CliError::failed(format_args!(
        "group `{id}` not found: it has no dead letters, or retention has deleted them"
    ))
}

async fn show(client: &DeadLetterClient, args: &ShowGroupArgs) -> Result<ExitCode, CliError> {
    let Some(mut group) = client.group(&args.id).await? else {
        return Err(not_found(&args.id));
    };
    let completeness = group.completeness.take().unwrap_or_default();
    let with_completeness = || {
        let mut value = as_json(&group);
        value["completeness"] = object(&completeness).into();
        value
    };
    print_item(args.output.format, || as_text(&group), with_completeness);
    Ok(args.complete.conclude(&completeness))
}

const COLUMNS: [Column<Group>; 11] = [
    ("group", |group, _| group.id.text()),
    ("state", |group, _| group.state().name()),
    ("open", |group, _| Some(open(group.open))),
    ("total", |group, _| group.count.text()),
    ("trend (24h)", |group, _| Some(sparkline(&group.trend))),
    ("first", |group, _| group.first_dead_at.text()),
    ("last", |group, _| group.last_dead_at.text()),
    ("class", |group, _| group.error_class.short(20)),
    ("code", |group, _| group.error_code.short(40)),
    ("pipeline", |group, _| group.pipeline.short(40)),
    ("template", |group, _| group.template.short(80)),
];

fn as_text(group: &Group) -> String {
    let topics: BTreeMap<_, _> = group.topics.iter().map(|of| (&of.topic, of.count)).collect();
    let topics = topics.iter().map(|(topic, count)| format!("{topic} {count}"));
    let trend: Vec<String> = group.trend.iter().map(u64::to_string).collect();
    // Since when a group is regressed is not known: the last decision is that it was resolved.
    let (at, by) = match group.state() {
        GroupState::Regressed => ("resolved at", "resolved by"),
        _ => ("decided at", "decided by"),
    };
    let per_hour = format!("{} (24 hours: {})", sparkline(&group.trend), trend.join(" "));
    fields(&[
        ("group", &group.id),
        ("state", &group.state().name()),
        (at, &group.state_time),
        ("muted until", &group.muted_until),
        (by, &group.state_by),
        ("reason", &group.state_reason),
        ("note", &group.note),
        ("note at", &group.note_time),
        ("note by", &group.note_by),
        ("problem", &group.problem),
        ("revision", &group.revision),
        ("pipeline", &group.pipeline),
        ("class", &group.error_class),
        ("code", &group.error_code),
        ("template", &group.template),
        ("open", &open(group.open)),
        ("total", &group.count),
        ("first", &group.first_dead_at),
        ("last", &group.last_dead_at),
        ("per hour", &per_hour),
        (
            "topics",
            &format_args!("{}", topics.collect::<Vec<_>>().join(", ")),
        ),
        ("newest", &group.sample_id),
        (
            "fingerprint",
            &format_args!("version {}", group.fingerprint_version),
        ),
    ])
}

fn as_json(group: &Group) -> Json {
    let mut object = object(group);
    let topics = group.topics.iter().map(|of| (of.topic.clone(), json!(of.count)));
    object.insert("topics".to_owned(), topics.collect::<Map<_, _>>().into());
    object.into()
}

/// One character for each number; a full block is the highest one.
fn sparkline(numbers: &[u64]) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let highest = numbers.iter().copied().max().unwrap_or(0).max(1);
    let bar = |number: &u64| {
        if *number == 0 {
            return '·';
        }
        let level = u128::from(*number) * 8 / u128::from(highest);
        BARS[usize::try_from(level.clamp(1, 8) - 1).unwrap_or_default()]
    };
    numbers.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_regressed_group_shows_its_resolution() {
        let text = |state: GroupState| {
            as_text(&Group {
                state: state.into(),
                state_time: Some(prost_types::Timestamp::default()),
                state_by: "ann".to_owned(),
                ..Group::default()
            })
        };
        for (state, verb, other) in [
            (GroupState::Regressed, "resolved", "decided"),
            (GroupState::Muted, "decided", "resolved"),
        ] {
            let text = text(state);
            for field in ["at", "by"] {
                assert!(text.contains(&format!("{verb} {field}")), "{text}");
                assert!(!text.contains(&format!("{other} {field}")), "{text}");
            }
        }
    }

    #[test]
    fn sparkline_shows_none_as_dots() {
        assert_eq!(sparkline(&[0, 0]), "··");
        assert_eq!(sparkline(&[0, 1, 100, 50, 200, u64::MAX / 2]), "·▁▁▁▁█");
        assert_eq!(sparkline(&[0, 1, 4, 8]), "·▁▄█");
        assert_eq!(sparkline(&[u64::MAX]), "█");
    }
}
