//! `redeliver dlq groups` and `redeliver dlq group`: dead letters that fail for the same reason.

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use redeliver_client::{
    Code, DeadLetterClient, Group, GroupChange, GroupOrder, GroupState, ListGroups, Timestamp,
};
use serde_json::json;

use super::completeness::{CompleteArgs, completeness_json};
use super::{FilterArgs, InspectorArgs, Listed, list_pages, print_with_completeness};
use crate::connection::CliError;
use crate::jobs::time;
use crate::output::{Json, OutputArgs, fields, print_item, print_items, shortened};

#[derive(Args)]
pub(super) struct GroupsArgs {
    #[command(flatten)]
    filter: FilterArgs,
    /// Only groups that have a state or a note but no dead letters, such as those that take the place of others; `reopen` and `note` reset them
    #[arg(long, conflicts_with_all = ["filter", "sort"])]
    without_dead_letters: bool,
    /// Only groups in this state; can be repeated
    #[arg(long = "state", value_name = "STATE", value_enum)]
    states: Vec<State>,
    /// Which groups come first
    #[arg(long, value_enum, default_value = "last-seen")]
    sort: Sort,
    /// Maximum number of groups
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    #[command(flatten)]
    complete: CompleteArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    pub(super) inspector: InspectorArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum State {
    /// Nobody has decided anything, the group was reopened, or the time for which it was muted is over
    Open,
    /// The reason is gone
    Resolved,
    /// Known and wanted
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
    /// Show a group: why its dead letters belong together, its state, counts and trend
    Show(ShowGroupArgs),
    /// Say that the reason is gone; a dead letter that is written later makes the group regressed
    Resolve(ResolveArgs),
    /// Say that the group is known and wanted, so that it is in no alert about groups
    Mute(MuteArgs),
    /// Set the state back to open
    Reopen(ResolveArgs),
    /// Set the note, a text for others
    Note(NoteArgs),
}

#[derive(Args)]
struct ResolveArgs {
    /// Why, for others; at most 1000 bytes
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    why: String,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
struct MuteArgs {
    /// Why, for others; at most 1000 bytes
    #[arg(long, value_name = "TEXT")]
    why: String,
    /// Until when, such as 2026-11-30T08:00:00Z (default: until somebody changes it); nothing tells that the time is over
    #[arg(long, value_name = "TIME", value_parser = time)]
    until: Option<Timestamp>,
    #[command(flatten)]
    change: ChangeArgs,
}

#[derive(Args)]
struct NoteArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// The note, at most 2000 bytes; "" removes it
    #[arg(value_name = "TEXT")]
    text: String,
}

#[derive(Args)]
struct ChangeArgs {
    /// The id of the group: 16 hexadecimal digits, as `redeliver dlq groups` prints it
    #[arg(value_name = "ID")]
    id: String,
    /// Fail unless it has this revision; 0: nobody has changed it yet
    #[arg(long, value_name = "N")]
    expected_revision: Option<u64>,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    inspector: InspectorArgs,
}

#[derive(Args)]
struct ShowGroupArgs {
    /// The id of the group: 16 hexadecimal digits, as `redeliver dlq groups` prints it
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    complete: CompleteArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    inspector: InspectorArgs,
}

impl GroupArgs {
    pub(super) fn inspector(&self) -> &InspectorArgs {
        match &self.verb {
            GroupVerb::Show(args) => &args.inspector,
            GroupVerb::Resolve(args) | GroupVerb::Reopen(args) => &args.change.inspector,
            GroupVerb::Mute(args) => &args.change.inspector,
            GroupVerb::Note(args) => &args.change.inspector,
        }
    }
}

pub(super) async fn list(client: &DeadLetterClient, args: &GroupsArgs) -> Result<ExitCode, CliError> {
    let request = ListGroups {
        filter: args.filter.filter.clone(),
        order: match args.sort {
            Sort::LastSeen => GroupOrder::LastSeen,
            Sort::FirstSeen => GroupOrder::FirstSeen,
            Sort::Count => GroupOrder::Count,
        },
        states: args.states.iter().map(|state| state.wanted()).collect(),
        without_dead_letters: args.without_dead_letters,
        ..ListGroups::default()
    };
    let format = args.output.format;
    let listed = list_pages(args.limit, format, as_json, async |page_size, page_token| {
        let request = ListGroups {
            page_size,
            page_token,
            ..request.clone()
        };
        let page = client.groups(&request).await?;
        Ok((page.groups, page.next_page_token, page.completeness))
    });
    let Listed {
        found,
        completeness,
        has_more,
    } = listed.await?;
    let columns = [
        "group",
        "state",
        "open",
        "total",
        "trend (24h)",
        "first",
        "last",
        "class",
        "code",
        "pipeline",
        "template",
    ];
    let all = || json!(found.iter().map(as_json).collect::<Vec<_>>());
    print_with_completeness(format, &completeness, "groups", all, || {
        print_items(format, &columns, &found, row, as_json);
    });
    if has_more {
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
            let change = args.change.with_reason(&args.why);
            (client.resolve_group(&change).await, &args.change)
        }
        GroupVerb::Mute(args) => {
            let change = args.change.with_reason(&args.why);
            (client.mute_group(&change, args.until).await, &args.change)
        }
        GroupVerb::Reopen(args) => {
            let change = args.change.with_reason(&args.why);
            (client.reopen_group(&change).await, &args.change)
        }
        GroupVerb::Note(args) => {
            let ChangeArgs {
                id,
                expected_revision,
                ..
            } = &args.change;
            let changed = client.annotate_group(id, &args.text, *expected_revision).await;
            (changed, &args.change)
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
    fn with_reason(&self, why: &str) -> GroupChange {
        GroupChange {
            id: self.id.clone(),
            why: why.to_owned(),
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
    let Some(found) = client.group(&args.id).await? else {
        return Err(not_found(&args.id));
    };
    let (group, completeness) = (&found.group, &found.completeness);
    let with_completeness = || {
        let mut value = as_json(group);
        value["completeness"] = completeness_json(completeness);
        value
    };
    print_item(args.output.format, || as_text(group), with_completeness);
    Ok(args.complete.conclude(completeness))
}

fn open(group: &Group) -> String {
    group
        .open
        .map_or_else(|| "unknown".to_owned(), |open| open.to_string())
}

fn row(group: &Group) -> Vec<String> {
    let text = |text: &Option<String>, limit| shortened(text.as_deref().unwrap_or_default(), limit);
    vec![
        group.id.clone(),
        group.state.as_str().to_owned(),
        open(group),
        group.count.to_string(),
        sparkline(&group.trend),
        group.first_dead_at.map(|at| at.to_string()).unwrap_or_default(),
        group.last_dead_at.map(|at| at.to_string()).unwrap_or_default(),
        text(&group.error_class, 20),
        text(&group.error_code, 40),
        text(&group.pipeline, 40),
        text(&group.template, 80),
    ]
}

fn as_text(group: &Group) -> String {
    let topics = group
        .topics
        .iter()
        .map(|(topic, count)| format!("{topic} {count}"));
    let trend: Vec<String> = group.trend.iter().map(u64::to_string).collect();
    // Since when a group is regressed is not known: the last thing that somebody has decided is that it was resolved.
    let (at, by) = match group.state {
        GroupState::Regressed => ("resolved at", "resolved by"),
        _ => ("decided at", "decided by"),
    };
    fields(&[
        ("group", Some(group.id.clone())),
        ("state", Some(group.state.as_str().to_owned())),
        (at, group.state_time.map(|at| at.to_string())),
        ("muted until", group.muted_until.map(|at| at.to_string())),
        (by, group.state_by.clone()),
        ("why", group.state_why.clone()),
        ("note", group.note.clone()),
        ("note at", group.note_time.map(|at| at.to_string())),
        ("note by", group.note_by.clone()),
        ("problem", group.problem.clone()),
        ("revision", Some(group.revision.to_string())),
        ("pipeline", group.pipeline.clone()),
        ("class", group.error_class.clone()),
        ("code", group.error_code.clone()),
        ("template", group.template.clone()),
        ("open", Some(open(group))),
        ("total", Some(group.count.to_string())),
        ("first", group.first_dead_at.map(|at| at.to_string())),
        ("last", group.last_dead_at.map(|at| at.to_string())),
        (
            "per hour",
            Some(format!(
                "{} (24 hours: {})",
                sparkline(&group.trend),
                trend.join(" ")
            )),
        ),
        ("topics", Some(topics.collect::<Vec<_>>().join(", "))),
        ("newest", group.sample_id.clone()),
        (
            "fingerprint",
            Some(format!("version {}", group.fingerprint_version)),
        ),
    ])
}

fn as_json(group: &Group) -> Json {
    json!({
        "id": group.id,
        "fingerprint_version": group.fingerprint_version,
        "pipeline": group.pipeline,
        "error_class": group.error_class,
        "error_code": group.error_code,
        "template": group.template,
        "count": group.count,
        "open": group.open,
        "first_dead_at": group.first_dead_at.map(|at| at.to_string()),
        "last_dead_at": group.last_dead_at.map(|at| at.to_string()),
        "topics": group.topics,
        "trend": group.trend,
        "sample_id": group.sample_id,
        "state": group.state.as_str(),
        "state_time": group.state_time.map(|at| at.to_string()),
        "state_by": group.state_by,
        "state_why": group.state_why,
        "muted_until": group.muted_until.map(|at| at.to_string()),
        "note": group.note,
        "note_time": group.note_time.map(|at| at.to_string()),
        "note_by": group.note_by,
        "revision": group.revision,
        "problem": group.problem,
    })
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
    fn sparkline_shows_none_as_dots() {
        assert_eq!(sparkline(&[0, 0]), "··");
        assert_eq!(sparkline(&[0, 1, 100, 50, 200, u64::MAX / 2]), "·▁▁▁▁█");
        assert_eq!(sparkline(&[0, 1, 4, 8]), "·▁▄█");
        assert_eq!(sparkline(&[u64::MAX]), "█");
    }
}
