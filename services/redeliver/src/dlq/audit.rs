//! `redeliver dlq audit`: who has changed or seen what.

use std::process::ExitCode;

use clap::Args;
use redeliver_client::convert::{time as time_of, to_timestamp};
use redeliver_client::messages::{AuditEntry, ListAuditEntriesRequest, ListedAuditEntry};
use redeliver_client::{AuditClient, Timestamp};
use serde_json::json;

use crate::connection::CliError;
use crate::output::{Column, Json, OutputArgs, Text as _, object, print_items};
use crate::pages::read_pages;
use crate::times::{check_range, past};

#[derive(Args)]
pub(super) struct AuditArgs {
    /// Only entries at this time or later, such as 2h (ago), yesterday or 2026-01-31T08:00:00Z (default: 24 hours ago)
    #[arg(long, value_name = "TIME", value_parser = past)]
    from: Option<Timestamp>,
    /// Only entries before this time (default: up to the newest)
    #[arg(long, value_name = "TIME", value_parser = past)]
    until: Option<Timestamp>,
    /// Only entries by this caller
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    by: String,
    /// Only entries with this action, such as control.pause or 'dead-letters.*'
    #[arg(long, value_name = "ACTION", default_value = "", hide_default_value = true)]
    action: String,
    /// Only entries with this target, such as app/sms, or with this id in a list of dead letters or jobs
    #[arg(long, value_name = "TARGET", default_value = "", hide_default_value = true)]
    target: String,
    /// Maximum number of entries, the oldest first
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    #[command(flatten)]
    output: OutputArgs,
}

pub(super) async fn run(client: &AuditClient, args: &AuditArgs) -> Result<ExitCode, CliError> {
    check_range(("--from", args.from), args.until)?;
    let (format, mut last) = (args.output.format, None);
    let pages = read_pages(args.limit, format, as_json, async |page_size, page_token| {
        let request = ListAuditEntriesRequest {
            from: args.from.map(to_timestamp),
            until: args.until.map(to_timestamp),
            by: args.by.clone(),
            action: args.action.clone(),
            target: args.target.clone(),
            page_size,
            page_token,
        };
        let page = client.list(request).await?;
        let time = |listed: &ListedAuditEntry| time_of(listed.entry.as_ref()?.time);
        last = page.entries.iter().rev().find_map(time).or(last);
        if page.incomplete {
            eprintln!(
                "later entries may be missing, because a transaction of a writer is open; try again later"
            );
        }
        Ok((page.entries, page.next_page_token))
    });
    let pages = pages.await?;
    print_items(format, &COLUMNS, &pages.items, as_json);
    if pages.has_more {
        let from = last.map_or_else(String::new, |time| format!(", or --from {time}"));
        eprintln!(
            "there are more entries; use --limit {}{from}",
            u64::from(args.limit) * 10
        );
    }
    Ok(ExitCode::SUCCESS)
}

const COLUMNS: [Column<ListedAuditEntry>; 7] = [
    ("time", |listed, _| listed.entry.as_ref()?.time.text()),
    ("by", |listed, _| listed.entry.as_ref()?.by.short(100)),
    ("action", |listed, _| match &listed.entry {
        Some(entry) => entry.action.text(),
        None => "(unreadable)".text(),
    }),
    ("target", |listed, _| match &listed.entry {
        Some(entry) => entry.target.short(60),
        None => listed.position.text(),
    }),
    ("count", |listed, _| {
        let count = listed.entry.as_ref()?.count;
        (count > 0).then(|| count.to_string())
    }),
    ("details", |listed, _| {
        let AuditEntry { filter, details, .. } = listed.entry.as_ref()?;
        filter.short(60).or_else(|| details.short(60))
    }),
    ("reason", |listed, _| listed.entry.as_ref()?.reason.short(60)),
];

fn as_json(listed: &ListedAuditEntry) -> Json {
    let position = listed.position.text();
    let Some(entry) = &listed.entry else {
        return json!({ "position": position, "readable": false });
    };
    let mut object = object(entry);
    object.insert("position".to_owned(), json!(position));
    object.into()
}
