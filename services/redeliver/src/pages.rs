//! Lists that services answer in pages.

use crate::connection::CliError;
use crate::output::{Format, Json, print_json_line};

/// The limit of the services.
const PAGE: u32 = 1_000;

/// What the pages of a list contain.
pub(crate) struct Pages<T> {
    /// Empty for JSON lines, which were printed.
    pub(crate) items: Vec<T>,
    /// How many there are.
    pub(crate) count: u32,
    /// Whether there are more than was asked for.
    pub(crate) has_more: bool,
}

/// Reads pages until there are this many items. `read` gets the size and the token of a page, and returns its items and the token of the next page, which
/// is empty on the last one. JSON lines are printed as they arrive, so a list of any length needs little memory.
pub(crate) async fn read_pages<T>(
    limit: u32,
    format: Format,
    value: impl Fn(&T) -> Json,
    mut read: impl AsyncFnMut(i32, String) -> Result<(Vec<T>, String), CliError>,
) -> Result<Pages<T>, CliError> {
    let mut pages = Pages {
        items: Vec::new(),
        count: 0,
        has_more: false,
    };
    let mut token = String::new();
    loop {
        let missing = limit.saturating_sub(pages.count);
        let size = i32::try_from(missing.min(PAGE)).unwrap_or(i32::MAX);
        let (items, next) = read(size, token).await?;
        pages.count = pages
            .count
            .saturating_add(u32::try_from(items.len()).unwrap_or(u32::MAX));
        // If stdout is closed, the others are not read.
        let is_closed = format == Format::Jsonl && !items.iter().all(|item| print_json_line(value(item)));
        if format != Format::Jsonl {
            pages.items.extend(items);
        }
        pages.has_more = !next.is_empty() && !is_closed;
        if !pages.has_more || pages.count >= limit {
            return Ok(pages);
        }
        token = next;
    }
}
