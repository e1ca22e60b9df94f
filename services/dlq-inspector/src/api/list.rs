//! Pages of dead letters, and single ones.

use redeliver_proto::error::invalid;
use redeliver_proto::{Message as _, v1};
use tonic::Status;

use super::token::{PAGE, question};
use super::{Api, convert, no_index, not_found, parse_filter};
use crate::index::{self, Direction, Found, Part};

const DEFAULT_PAGE: usize = 50;
const LARGEST_PAGE: usize = 1000;
/// A page ends early rather than not fit into a message: clients take 4 MiB unless they are told otherwise.
const PAGE_BYTES: usize = 3 << 20;
/// How many values are read from Kafka at once.
const VALUES: usize = 32;

impl Api {
    pub(super) async fn list(
        &self,
        request: v1::ListDeadLettersRequest,
    ) -> Result<v1::ListDeadLettersResponse, Status> {
        let filter = parse_filter(&request.filter)?;
        let direction = direction(&request.order_by)?;
        let size = page_size(request.page_size)?;
        let order = if direction == Direction::Ascending {
            "ascending"
        } else {
            ""
        };
        let asked = question(&["list", &request.filter, order]);
        let behind = PAGE.read(self.generation, asked, &request.page_token)?;
        let is_full = is_full(request.view);
        let Part { found, mut has_more } = self
            .pool
            .read(move |connection| index::list(connection, &filter, direction, behind, size))
            .await
            .map_err(|error| no_index(&error))?;

        let mut page = Vec::new();
        let mut bytes = 0;
        let mut last = None;
        'page: for part in found.chunks(VALUES) {
            for (found, shown) in part.iter().zip(self.shown(part, is_full).await?) {
                // What is gone from Kafka by now is not shown any more.
                let size = shown.as_ref().map_or(0, v1::DeadLetter::encoded_len);
                if bytes + size > PAGE_BYTES && !page.is_empty() {
                    has_more = true;
                    break 'page;
                }
                bytes += size;
                last = Some(found.place());
                page.extend(shown);
            }
        }
        let token = last.filter(|_| has_more);
        let next_page_token =
            token.map_or_else(String::new, |place| PAGE.write(self.generation, asked, place));
        Ok(v1::ListDeadLettersResponse {
            dead_letters: page,
            next_page_token,
        })
    }

    pub(super) async fn get(&self, id: String) -> Result<v1::DeadLetter, Status> {
        let found = self.find(&id).await?;
        let record = self.record_of(&found).await?.ok_or_else(|| not_found(&id))?;
        Ok(convert::full(&found, record.value))
    }

    /// Dead letters as they are shown. In full only those that still stand in Kafka.
    pub(super) async fn shown(
        &self,
        found: &[Found],
        is_full: bool,
    ) -> Result<Vec<Option<v1::DeadLetter>>, Status> {
        if !is_full {
            return Ok(found.iter().map(|found| Some(convert::basic(found))).collect());
        }
        let records = self.records_of(found).await?;
        let shown = found.iter().zip(records);
        Ok(shown
            .map(|(found, record)| Some(convert::full(found, record?.value)))
            .collect())
    }
}

/// A view that is not known is the basic one.
pub(super) fn is_full(view: i32) -> bool {
    view == v1::DeadLetterView::Full as i32
}

fn direction(order_by: &str) -> Result<Direction, Status> {
    let words: Vec<&str> = order_by.split_whitespace().collect();
    match words[..] {
        [] | ["dead_at", "desc"] => Ok(Direction::Descending),
        ["dead_at"] | ["dead_at", "asc"] => Ok(Direction::Ascending),
        _ => Err(invalid(
            "order_by",
            "is not `dead_at desc` or `dead_at`",
            "ORDER_INVALID",
            [],
        )),
    }
}

fn page_size(asked: i32) -> Result<usize, Status> {
    match usize::try_from(asked) {
        Ok(0) => Ok(DEFAULT_PAGE),
        Ok(size) => Ok(size.min(LARGEST_PAGE)),
        Err(_) => Err(invalid("page_size", "is negative", "PAGE_SIZE_INVALID", [])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_and_sizes_are_checked() {
        assert_eq!(direction("").unwrap(), Direction::Descending);
        assert_eq!(direction(" dead_at  desc ").unwrap(), Direction::Descending);
        assert_eq!(direction("dead_at").unwrap(), Direction::Ascending);
        assert!(direction("retry_count").is_err() && direction("dead_at desc, id").is_err());
        assert_eq!(page_size(0).unwrap(), 50);
        assert_eq!(page_size(7).unwrap(), 7);
        assert_eq!(page_size(5000).unwrap(), 1000);
        assert!(page_size(-1).is_err());
    }
}
