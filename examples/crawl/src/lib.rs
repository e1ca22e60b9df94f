//! A crawler made of Redeliver: scheduled jobs, a worker of its own, polite to each host.
//!
//! | module | idea |
//! |---|---|
//! | [`pace`] | when one host may be asked; pure |
//! | [`hosts`] | the turns of all hosts, and what each asks for |
//! | [`robots`] | what a `/robots.txt` says; pure |
//! | [`page`] | title and links of a page; pure |
//! | [`fetch`] | one request and what its answer means |
//! | [`job`] | what is written: jobs and results |
//! | [`crawler`] | the worker's handler, made of all these |
//! | [`worker`] | the handler between the topics |
//!
//! The rest shows it: [`site`] is crawled, [`watch`] follows the topics into a [`ledger`], [`report`] judges,
//! [`show`] runs all in one process, and [`demo`] without Kafka and Redis.

pub mod crawler;
pub mod demo;
pub mod fetch;
pub mod hosts;
pub mod job;
pub mod ledger;
pub mod pace;
pub mod page;
pub mod report;
pub mod robots;
pub mod show;
pub mod site;
pub mod watch;
pub mod worker;
