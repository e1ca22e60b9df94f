//! Records that benchmarks write.

use redeliver_core::headers::{self, Origin};
use redeliver_core::{Failure, Headers, HumanDuration, Output, Pipeline, Timestamp};

pub(crate) const VALUE: usize = 200;

/// A record as a worker writes it to a tier: lineage, failure, time lock, and one header of the user.
pub(crate) fn waiting(pipeline: &Pipeline, tier: HumanDuration, index: usize, due: Timestamp) -> Output {
    let mut list = Headers::new();
    list.push_text("tenant", "a");
    let offset = i64::try_from(index).unwrap_or(i64::MAX);
    let origin = Origin {
        topic: pipeline.source.clone(),
        partition: 0,
        offset,
        timestamp: Some(due),
    };
    headers::write_lineage(&mut list, &pipeline.name, &origin, 1);
    headers::write_failure(&mut list, &Failure::transient("http.503", "busy"), due);
    list.push_text(headers::PROCESS_AFTER, &due.to_string());
    list.push_text(headers::RETURN_TOPIC, &pipeline.return_topic());
    Output {
        topic: pipeline.tier_topic(tier),
        partition: None,
        key: Some(format!("key-{index}").into()),
        value: Some(vec![b'x'; VALUE].into()),
        headers: list,
    }
}
