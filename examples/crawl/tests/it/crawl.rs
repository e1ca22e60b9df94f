//! Every page of a site ends exactly once, and its hosts are asked as they want to be.

use std::time::Duration;

use bytes::Bytes;
use redeliver_core::{Headers, Output};
use redeliver_example_crawl::hosts;
use redeliver_example_crawl::job::CrawlJob;
use redeliver_example_crawl::report::Report;
use redeliver_example_crawl::site::{Behaviour, Fate, HostPlan, Link, Plan, RobotsPlan};
use redeliver_testkit::eventually;
use reqwest::Url;

use crate::support::{Service, Setup};

const DEADLINE: Duration = Duration::from_secs(120);
const START: Duration = Duration::from_secs(60);

/// A site with every kind of trouble that is over within seconds.
fn plan() -> Plan {
    let millis = Duration::from_millis;
    let asks = Behaviour::Asks {
        times: 1,
        wait: Duration::from_secs(1),
    };
    let moved = Behaviour::Moved(Link { host: 1, page: 3 });
    let mut plan = Plan {
        hosts: vec![
            HostPlan::new("library", Some(millis(100)), 16)
                .with(3, Behaviour::Busy(2))
                .with(5, Behaviour::Gone)
                .with(6, Behaviour::Hangs(1))
                .with(9, Behaviour::Busy(u32::MAX)),
            HostPlan::new("museum", Some(millis(200)), 10)
                .with(2, asks)
                .with(4, moved)
                .with(7, Behaviour::Missing)
                .private(8),
            HostPlan::new("office", Some(millis(1_500)), 3),
            HostPlan::new("gazette", None, 4).robots(RobotsPlan::Missing),
        ],
    };
    plan.link_all();
    plan
}

/// Waits until both workers have partitions, and all of them.
fn until_shared(workers: &mut [Service], partitions: usize) {
    eventually("the workers share the partitions", START, || {
        let shares: Vec<usize> = workers.iter_mut().map(Service::partitions).collect();
        if shares.iter().sum::<usize>() == partitions && shares.iter().all(|share| *share > 0) {
            Ok(())
        } else {
            Err(format!("{shares:?}"))
        }
    });
}

#[track_caller]
fn assert_as_it_must_be(setup: &Setup, closing: &[String]) {
    let pause = hosts::Settings::default().delay;
    let report = Report::new(&setup.map, &setup.log, &setup.ledger(), pause, closing);
    println!("{report}");
    assert!(report.problems.is_empty(), "{report}");
}

/// Asks for a page in each shard of the scheduler, behind all that was asked for before, and waits for them. Then
/// everything that the scheduler had to decide on is decided.
fn close(setup: &Setup, partitions: i32) -> Vec<String> {
    let scheduling = &setup.crawl.scheduling;
    let of_shard = |shard| {
        let mut pages = (0..).map(|number| setup.map.closing_page(number));
        let shard_of =
            |page: &Url| redeliver_kafka::murmur2::shard_of(&scheduling.app, page.as_str(), partitions);
        pages.find(|page| shard_of(page) == shard).unwrap()
    };
    let pages: Vec<Url> = (0..partitions).map(of_shard).collect();
    let requests: Vec<Output> = pages.iter().map(|page| scheduling.last(page)).collect();
    setup.send(&requests);
    let closing: Vec<String> = pages.into_iter().map(String::from).collect();
    setup.until_ended(&closing, DEADLINE);
    closing
}

#[test]
fn a_crawl_that_begins_with_one_page_ends_with_every_page_once() {
    let setup = Setup::new("crawl", plan());
    let (_scheduler, _tier) = (setup.start("scheduler", "a"), setup.start("retry-tier", "a"));
    // A host's jobs are all in one partition, so two workers are as polite as one.
    let mut workers = [setup.worker("a"), setup.worker("b")];
    until_shared(&mut workers, 4);
    let seeds = setup.map.seeds();
    let requests: Vec<Output> = seeds
        .iter()
        .map(|page| setup.crawl.scheduling.seed(page))
        .collect();
    setup.send(&requests);
    setup.until_ended(setup.map.reachable().keys(), DEADLINE);
    let closing = close(&setup, 4);
    assert_as_it_must_be(&setup, &closing);
    assert_eq!(setup.refused_requests(), 0);
    let waits: u32 = setup.ledger().pages().map(|(_, seen)| seen.trips).sum();
    assert!(waits > 0, "no job ever waited in a tier for its turn");
}

#[test]
fn a_worker_that_is_killed_again_and_again_loses_and_doubles_no_page() {
    let setup = Setup::new("crawl-kill", plan());
    let (_scheduler, _tier) = (setup.start("scheduler", "a"), setup.start("retry-tier", "a"));
    let seeds = setup.map.seeds();
    let requests: Vec<Output> = seeds
        .iter()
        .map(|page| setup.crawl.scheduling.seed(page))
        .collect();
    let reachable = setup.map.reachable();
    let ended = || {
        let ledger = setup.ledger();
        reachable
            .keys()
            .filter(|page| ledger.seen(page).has_ended())
            .count()
    };
    let mut worker = setup.worker("a");
    setup.send(&requests);
    for kill in 1..=4 {
        // At other places each time, while there is still work.
        let enough = kill * reachable.len() / 6;
        eventually("some pages have ended", DEADLINE, || {
            let ended = ended();
            if ended >= enough { Ok(()) } else { Err(ended) }
        });
        assert!(ended() < reachable.len(), "killed too late to prove anything");
        worker.0.kill_9();
        worker = setup.worker("a");
    }
    setup.until_ended(reachable.keys(), DEADLINE);
    let closing = close(&setup, 4);
    let mut expected = reachable;
    expected.extend(closing.into_iter().map(|page| (page, Fate::Crawled(200))));
    // A page may be asked for again when its worker was killed, and a new one knows nothing of the pause before it.
    // What is written, however, is written once.
    let problems = setup.ledger().problems(&expected, setup.map.word());
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert_eq!(setup.refused_requests(), 0);
}

#[test]
fn jobs_of_any_producer_are_crawled_and_what_is_found_is_requested_in_the_same_transaction() {
    let setup = Setup::new("crawl-plain", plan());
    let (_tier, _worker) = (setup.start("retry-tier", "a"), setup.worker("a"));
    let job = |url: &str, key: &str| Output {
        topic: setup.crawl.pipeline.source.clone(),
        partition: None,
        key: Some(key.to_owned().into()),
        value: Some(
            serde_json::to_vec(&CrawlJob { url: url.to_owned() })
                .unwrap()
                .into(),
        ),
        headers: Headers::new(),
    };
    let reachable = setup.map.reachable();
    let host_of = |page: &str| page.parse::<Url>().unwrap().origin().ascii_serialization();
    let mut jobs: Vec<Output> = reachable.keys().map(|page| job(page, &host_of(page))).collect();
    jobs.push(Output {
        value: Some(Bytes::from_static(b"no job")),
        ..job("", "bad")
    });
    jobs.push(job("http://elsewhere.invalid/", "elsewhere"));
    setup.send(&jobs);
    setup.until_ended(reachable.keys(), DEADLINE);
    assert_as_it_must_be(&setup, &[]);
    let elsewhere = setup.ledger().seen("http://elsewhere.invalid/");
    assert_eq!(elsewhere.dead, ["crawl.out-of-bounds"]);
    let dead = reachable
        .values()
        .filter(|fate| matches!(fate, Fate::Dead(_)))
        .count();
    assert_eq!(setup.count(&setup.crawl.pipeline.dead_letter_topic()), dead + 2);
    // With no scheduler to decide which of them are new, all requests are there: one for each link of each result.
    let links: usize = setup.results().iter().map(|result| result.links.len()).sum();
    assert!(links > reachable.len());
    assert_eq!(setup.count(&setup.crawl.scheduling.ingest), links);
}
