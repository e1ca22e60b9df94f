//! A local Redis keeps its port over restarts, and no data.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use redeliver_testkit::LocalRedis;
use redeliver_testkit::local_redis::answers;

fn ask(redis: &LocalRedis, command: &str, expected: &str) {
    let mut stream = TcpStream::connect(redis.url().strip_prefix("redis://").unwrap()).unwrap();
    write!(stream, "{command}\r\n").unwrap();
    let mut answer = vec![0; expected.len()];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(String::from_utf8_lossy(&answer), expected);
}

#[test]
fn killed_redis_restarts_empty() {
    let mut redis = LocalRedis::start().unwrap();
    let url = redis.url();
    ask(&redis, "SET due 1", "+OK\r\n");
    ask(&redis, "EXISTS due", ":1\r\n");

    redis.kill_9();
    assert!(answers(&url).is_err());
    redis.start_again().unwrap();
    redis.restart().unwrap();

    assert_eq!(redis.url(), url);
    answers(&url).unwrap();
    ask(&redis, "EXISTS due", ":0\r\n");
}
