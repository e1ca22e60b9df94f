//! The crawl example's binary.

fn main() {}
