//! `redeliver dlq audit`: who has changed or seen what.

use std::process::ExitCode;

use clap::Args;
use redeliver_client::{AuditClient, AuditEntry, DisclosedRange, ListAuditEntries, Timestamp};
use serde_json::json;

use super::{InspectorArgs, PAGE};
use crate::connection::CliError;
use crate::jobs::time;
use crate::output::{Format, Json, OutputArgs, print_items, print_json_line, shortened};

#[derive(Args)]
pub(super) struct AuditArgs {
    /// Only entries of this time or later, such as 2026-01-31T08:00:00Z (default: 24 hours ago)
    #[arg(long, value_name = "TIME", value_parser = time)]
    from: Option<Timestamp>,
    /// Only entries before this time (default: up to the newest)
    #[arg(long, value_name = "TIME", value_parser = time)]
    until: Option<Timestamp>,
    /// Only entries by this caller
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    by: String,
    /// Only entries with this action, such as control.pause or 'dead-letters.*'
    #[arg(long, value_name = "ACTION", default_value = "", hide_default_value = true)]
    action: String,
    /// Only entries with this target, such as app/sms, or with this id of a dead letter or job among others
    #[arg(long, value_name = "TARGET", default_value = "", hide_default_value = true)]
    target: String,
    /// Maximum number of entries, the oldest first
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    pub(super) inspector: InspectorArgs,
}

pub(super) async fn run(client: &AuditClient, args: &AuditArgs) -> Result<ExitCode, CliError> {
    if let (Some(from), Some(until)) = (args.from, args.until)
        && from >= until
    {
        return Err(CliError::Usage("--until is not later than --from".to_owned()));
    }
    let mut request = ListAuditEntries {
        from: args.from,
        until: args.until,
        by: args.by.clone(),
        action: args.action.clone(),
        target: args.target.clone(),
        ..ListAuditEntries::default()
    };
    let format = args.output.format;
    let (mut entries, mut count, mut last) = (Vec::new(), 0, None);
    let has_more = loop {
        let missing = args.limit.saturating_sub(count);
        request.page_size = u16::try_from(missing.min(PAGE)).unwrap_or(u16::MAX);
        let page = client.list(&request).await?;
        count += u32::try_from(page.entries.len()).unwrap_or(u32::MAX);
        last = page.entries.iter().rev().find_map(|entry| entry.time).or(last);
        // Lines are printed as they arrive.
        let is_closed =
            format == Format::Jsonl && !page.entries.iter().all(|entry| print_json_line(as_json(entry)));
        if format != Format::Jsonl {
            entries.extend(page.entries);
        }
        if page.is_incomplete {
            eprintln!(
                "later entries may be missing, because a transaction of a writer is open; try again later"
            );
        }
        match page.next_page_token {
            None => break false,
            // Nobody reads the others.
            Some(_) if is_closed => break false,
            Some(_) if count >= args.limit => break true,
            Some(token) => request.page_token = token,
        }
    };
    let columns = ["time", "by", "action", "target", "count", "details", "why"];
    if format != Format::Jsonl {
        print_items(format, &columns, &entries, row, as_json);
    }
    if has_more {
        let from = last.map_or_else(String::new, |time| format!(", or --from {time}"));
        eprintln!(
            "there are more entries; use --limit {}{from}",
            u64::from(args.limit) * 10
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn row(entry: &AuditEntry) -> Vec<String> {
    let text = |text: &Option<String>, limit| shortened(text.as_deref().unwrap_or_default(), limit);
    if !entry.is_readable {
        let position = entry
            .position
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default();
        return ["", "", "(unreadable)", &position, "", "", ""]
            .map(str::to_owned)
            .to_vec();
    }
    vec![
        entry.time.map(|time| time.to_string()).unwrap_or_default(),
        shortened(&entry.by, 100),
        entry.action.clone(),
        text(&entry.target, 60),
        if entry.count > 0 {
            entry.count.to_string()
        } else {
            String::new()
        },
        text(
            if entry.filter.is_some() {
                &entry.filter
            } else {
                &entry.details
            },
            60,
        ),
        text(&entry.why, 60),
    ]
}

fn as_json(entry: &AuditEntry) -> Json {
    let position = entry.position.as_ref().map(ToString::to_string);
    if !entry.is_readable {
        return json!({ "position": position, "readable": false });
    }
    json!({
        "position": position,
        "time": entry.time.map(|time| time.to_string()),
        "by": entry.by,
        "action": entry.action,
        "target": entry.target,
        "why": entry.why,
        "details": entry.details,
        "filter": entry.filter,
        "count": entry.count,
        "ids": entry.ids,
        "ranges": entry.ranges.iter().map(range).collect::<Vec<_>>(),
        "masked": entry.is_masked,
        "service": entry.service,
        "instance": entry.instance,
        "id": entry.id,
    })
}

fn range(range: &DisclosedRange) -> Json {
    json!({
        "topic": range.topic,
        "partition": range.partition,
        "first_offset": range.first_offset,
        "last_offset": range.last_offset,
        "count": range.count,
    })
}
