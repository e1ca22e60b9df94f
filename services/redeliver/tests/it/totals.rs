//! Each service says at its end what it has done. What it says: `docs.rs`.

use std::collections::BTreeMap;

use redeliver_testkit::ServiceProcess;

use crate::support::{DEADLINE, PipeBuilder};

const LINE: &str = "totals since the start ";

/// The fields of the one line with the totals.
#[track_caller]
pub(crate) fn totals(process: &ServiceProcess) -> BTreeMap<String, String> {
    let output = process.output();
    let lines: Vec<&str> = output
        .lines()
        .filter_map(|line| Some(line.split_once(LINE)?.1))
        .collect();
    let [fields] = lines[..] else {
        panic!("{} lines with totals: {output}", lines.len());
    };
    let fields = fields.split(' ').filter_map(|field| field.split_once('='));
    fields
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

#[test]
fn failed_service_logs_totals() {
    let pipe = PipeBuilder::new("totals-error").without_topics();
    let mut enricher = pipe.spawn("enricher", "a", &[]);
    assert_eq!(enricher.wait(DEADLINE).code(), Some(1));
    assert_eq!(totals(&enricher)["service"], "\"enricher\"");
    assert!(
        enricher.output().contains("topics are missing"),
        "{}",
        enricher.output()
    );
}
