//! The crawl in Python, on the same site and the same topics.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use redeliver_example_crawl::site::{Behaviour, Fate, HostPlan, Plan, RobotsPlan};
use redeliver_testkit::{Process, languages};

use crate::support::Setup;

/// What a crawler finds that reads no robots.txt and follows redirects by itself.
fn plan() -> Plan {
    let mut plan = Plan {
        hosts: vec![
            HostPlan::new("library", None, 6)
                .robots(RobotsPlan::Missing)
                .with(2, Behaviour::Busy(1))
                .with(3, Behaviour::Gone)
                .with(4, Behaviour::Hangs(1)),
            HostPlan::new("gazette", None, 4)
                .robots(RobotsPlan::Missing)
                .with(1, Behaviour::Missing)
                .with(3, Behaviour::Busy(u32::MAX)),
        ],
    };
    plan.link_all();
    plan
}

#[test]
fn the_crawl_in_python_finds_the_same_pages() {
    let setup = Setup::new("crawl-py", plan());
    let _scheduler = setup.start("scheduler", "a");
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let python = languages::python(&here.join("requirements.txt")).unwrap();
    let mut command = Command::new(python);
    command
        .arg(here.join("crawl.py"))
        .arg(&setup.kafka.brokers)
        .args(setup.map.seeds().iter().map(reqwest::Url::as_str))
        .env("TOPICS", setup.topics_of_python());
    let crawler = Process::spawn(command).unwrap();
    let reachable = setup.map.reachable();
    setup.until_ended(reachable.keys(), Duration::from_secs(120));
    assert!(crawler.is_running());
    let ledger = setup.ledger();
    for (page, fate) in &reachable {
        let seen = ledger.seen(page);
        // It was not killed, so even at-least-once is once.
        let found = (seen.results.as_slice(), seen.dead.len());
        let expected = match fate {
            Fate::Crawled(status) => (&[*status][..], 0),
            Fate::Dead(_) => (&[][..], 1),
        };
        assert_eq!(found, expected, "{page}");
    }
    for host in 0..setup.map.hosts().len() {
        let summary = setup.log.summary(host);
        assert_eq!(summary.most_at_once, 1);
        assert!(summary.least_distance.unwrap() >= Duration::from_millis(500));
    }
    assert_eq!(setup.refused_requests(), 0);
}
