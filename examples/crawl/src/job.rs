//! What is written: the jobs that are scheduled, the value of each, and the result of a page. All JSON, so that
//! any language can take part.

use std::sync::Arc;

use bytes::Bytes;
use redeliver_core::outcome::Produced;
use redeliver_core::{Headers, Output};
use redeliver_kafka::murmur2::murmur2;
use reqwest::Url;
use serde::{Deserialize, Serialize};

/// The value of a job: which page is to be crawled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrawlJob {
    /// The page's address.
    pub url: String,
}

/// The value of a result: what was found at an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrawlResult {
    /// The page's address.
    pub url: String,
    /// The status that the host answered.
    pub status: u16,
    /// The page's title, if it is HTML and has one.
    pub title: Option<String>,
    /// Where it links to.
    pub links: Vec<String>,
}

/// A request to the scheduler, as JSON on its ingest topic.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct JobRequest<'a> {
    app_name: &'a str,
    delay: String,
    idempotency_key: &'a str,
    key: String,
    job_data: CrawlJob,
}

/// How crawl jobs are scheduled.
#[derive(Clone, Debug)]
pub struct Scheduling {
    /// The application of the scheduler's that crawls.
    pub app: Arc<str>,
    /// The topic on which the scheduler takes requests.
    pub ingest: Arc<str>,
    /// Jobs are spread over so many milliseconds, at least 1.
    pub spread: u32,
}

/// The name of a page's host: scheme, name and port, which is what a `/robots.txt` speaks for.
#[must_use]
pub fn host_name(page: &Url) -> String {
    page.origin().ascii_serialization()
}

impl Scheduling {
    /// The request to crawl a page once, as a worker's output. However often a page is requested within the
    /// scheduler's window, it is one job, because its address is the idempotency key.
    ///
    /// The delay is part of what makes two requests the same, so it must be the same whichever page the link was
    /// found on. It is therefore drawn from the address: it spreads the links of a page over some time, and
    /// the worker's turns do the rest.
    #[must_use]
    pub fn request(&self, page: &Url) -> Produced {
        Produced {
            topic: Some(self.ingest.clone()),
            key: Some(Some(self.key(page))),
            value: Some(Some(self.value(page, self.delay_of(page)))),
            headers: Headers::new(),
        }
    }

    /// The same request as a record, for those who begin a crawl.
    #[must_use]
    pub fn seed(&self, page: &Url) -> Output {
        self.record(page, self.delay_of(page))
    }

    /// A request for a page that is due behind all that were requested before.
    #[must_use]
    pub fn last(&self, page: &Url) -> Output {
        self.record(page, self.spread)
    }

    fn record(&self, page: &Url, delay: u32) -> Output {
        Output {
            topic: self.ingest.clone(),
            partition: None,
            key: Some(self.key(page)),
            value: Some(self.value(page, delay)),
            headers: Headers::new(),
        }
    }

    /// In milliseconds.
    fn delay_of(&self, page: &Url) -> u32 {
        murmur2(page.as_str().as_bytes()).unsigned_abs() % self.spread.max(1)
    }

    /// The key of the request's record. Any would do; this one leads straight to the partition where the
    /// scheduler decides upon the idempotency key.
    fn key(&self, page: &Url) -> Bytes {
        format!("{}\0{page}", self.app).into()
    }

    fn value(&self, page: &Url, delay: u32) -> Bytes {
        let request = JobRequest {
            app_name: &self.app,
            delay: format!("{delay}ms"),
            idempotency_key: page.as_str(),
            // All jobs of a host are in one partition, and so with one worker, which can then be polite.
            key: host_name(page),
            job_data: CrawlJob {
                url: page.to_string(),
            },
        };
        json(&request)
    }
}

/// The record of a result, to the pipeline's output, with the address as its key.
#[must_use]
pub fn produced(result: &CrawlResult) -> Produced {
    Produced {
        key: Some(Some(result.url.clone().into())),
        ..Produced::value(Some(json(result)))
    }
}

fn json(value: &impl Serialize) -> Bytes {
    serde_json::to_vec(value)
        .expect("texts, numbers and lists can always be written as JSON")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scheduling() -> Scheduling {
        Scheduling {
            app: "crawl".into(),
            ingest: "scheduler.jobs.ingest".into(),
            spread: 1_000,
        }
    }

    #[test]
    fn a_request_is_the_documented_json_and_goes_where_its_key_is_decided_upon() {
        let page: Url = "http://127.0.0.1:8080/a?b=c".parse().unwrap();
        let request = scheduling().request(&page);
        let value: serde_json::Value = serde_json::from_slice(&request.value.unwrap().unwrap()).unwrap();
        let delay = value["delay"].as_str().unwrap().to_owned();
        assert_eq!(
            value,
            serde_json::json!({
                "appName": "crawl",
                "delay": delay,
                "idempotencyKey": "http://127.0.0.1:8080/a?b=c",
                "key": "http://127.0.0.1:8080",
                "jobData": { "url": "http://127.0.0.1:8080/a?b=c" },
            })
        );
        assert!(delay.parse::<redeliver_core::Span>().unwrap().as_millis() < 1_000);
        let key = request.key.unwrap().unwrap();
        for partitions in 1..20 {
            assert_eq!(
                redeliver_kafka::murmur2::partition_for_key(&key, partitions),
                redeliver_kafka::murmur2::shard_of("crawl", page.as_str(), partitions)
            );
        }
    }

    #[test]
    fn two_requests_for_a_page_are_the_same_and_those_of_several_pages_are_spread() {
        let value = |page: &str| scheduling().seed(&page.parse().unwrap()).value.unwrap();
        assert_eq!(value("http://a/1"), value("http://a/1"));
        let delays: std::collections::HashSet<String> = (0..100)
            .map(|page| {
                let value: serde_json::Value =
                    serde_json::from_slice(&value(&format!("http://a/{page}"))).unwrap();
                value["delay"].as_str().unwrap().to_owned()
            })
            .collect();
        assert!(delays.len() > 80, "{}", delays.len());
    }
}
