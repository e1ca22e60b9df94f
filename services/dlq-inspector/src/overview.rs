//! What happens in all pipelines, and what is wrong.
//!
//! One task surveys Kafka and the index for all callers, while there are any. Each survey is put together into one overview, of which each caller
//! gets the part that it may see. A caller that reads slowly misses overviews: only the newest one is kept.
//!
//! | module | responsibility |
//! |---|---|
//! | `survey` | what a survey has found; no IO |
//! | `history` | rates, what grows, and since when something is wrong, from several surveys; no IO |
//! | `pipelines` | the rows of pipelines; no IO |
//! | `problems` | what is wrong; no IO |
//! | `view` | what a caller sees; no IO |
//! | `surveyor` | surveys Kafka and the index |
//! | `task` | when to survey |

pub(crate) mod history;
pub(crate) mod pipelines;
pub(crate) mod problems;
pub(crate) mod survey;
pub(crate) mod surveyor;
pub(crate) mod task;
#[cfg(test)]
mod tests;
pub(crate) mod view;
