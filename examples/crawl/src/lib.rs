//! A crawler made of Redeliver: scheduled jobs, a worker of its own, polite to each host.
//!
//! | module | idea |
//! |---|---|
//! | [`pace`] | when one host may be asked; pure |
//! | [`hosts`] | the turns of all hosts, and what each asks for |
//! | [`robots`] | what a `/robots.txt` says |
//! | [`page`] | title and links of a page |
//! | [`fetch`] | one request and what its answer means |
//! | [`job`] | what is written: jobs and results |
//! | [`crawler`] | the worker's handler, made of all these |

pub mod crawler;
pub mod fetch;
pub mod hosts;
pub mod job;
pub mod pace;
pub mod page;
pub mod robots;
