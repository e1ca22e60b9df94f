//! `redeliver dlq groups` and `redeliver dlq group`: dead letters that fail for the same reason.

use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use redeliver_client::{DeadLetterClient, Group, GroupOrder, ListGroups};
use serde_json::{Value, json};

use super::completeness::{CompleteArgs, completeness_json};
use super::{FilterArgs, InspectorArgs, Listed, list_pages, print_with_completeness};
use crate::connection::CliError;
use crate::output::{OutputArgs, fields, print_item, print_items, shortened};

#[derive(Args)]
pub(super) struct GroupsArgs {
    #[command(flatten)]
    filter: FilterArgs,
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
    /// Show a group: why its dead letters belong together, counts and trend
    Show(ShowGroupArgs),
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
        let GroupVerb::Show(args) = &self.verb;
        &args.inspector
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
    let GroupVerb::Show(args) = &args.verb;
    let Some(found) = client.group(&args.id).await? else {
        return Err(CliError::failed(format_args!(
            "group `{}` not found: it has no dead letters, or retention has deleted them",
            args.id
        )));
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
    fields(&[
        ("group", Some(group.id.clone())),
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

fn as_json(group: &Group) -> Value {
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
    fn a_sparkline_shows_no_dead_letters_as_dots_and_few_as_the_lowest_bar() {
        assert_eq!(sparkline(&[0, 0]), "··");
        assert_eq!(sparkline(&[0, 1, 100, 50, 200, u64::MAX / 2]), "·▁▁▁▁█");
        assert_eq!(sparkline(&[0, 1, 4, 8]), "·▁▄█");
        assert_eq!(sparkline(&[u64::MAX]), "█");
    }
}
