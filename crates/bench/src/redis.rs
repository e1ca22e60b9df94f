//! A minimal Redis client.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, bail};

/// A connection to a Redis that only the benchmark uses.
pub(crate) struct Redis {
    pub(crate) url: String,
    stream: BufReader<TcpStream>,
}

impl Redis {
    pub(crate) fn connect(url: &str) -> anyhow::Result<Self> {
        let address = url
            .strip_prefix("redis://")
            .context("the URL must be redis://HOST:PORT")?;
        let stream = TcpStream::connect(address).context("connecting to Redis")?;
        Ok(Self {
            url: url.to_owned(),
            stream: BufReader::new(stream),
        })
    }

    /// Sends a command and reads its reply: a bulk string, an integer or a status.
    fn command(&mut self, words: &[&str]) -> anyhow::Result<String> {
        let mut command = format!("*{}\r\n", words.len());
        for word in words {
            command += &format!("${}\r\n{word}\r\n", word.len());
        }
        self.stream.get_mut().write_all(command.as_bytes())?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let line = line.trim_end();
        match line.split_at_checked(1) {
            Some(("+" | ":", text)) => Ok(text.to_owned()),
            Some(("$", length)) => {
                let mut text = vec![0; length.parse::<usize>()? + 2];
                self.stream.read_exact(&mut text)?;
                text.truncate(text.len() - 2);
                Ok(String::from_utf8(text)?)
            }
            _ => bail!("unexpected reply of Redis: {line:?}"),
        }
    }

    pub(crate) fn empty(&mut self) -> anyhow::Result<()> {
        self.command(&["FLUSHALL", "SYNC"]).map(drop)
    }

    /// Limits the memory to what is used now and this many bytes; `None`: no limit.
    pub(crate) fn limit_memory(&mut self, more: Option<u32>) -> anyhow::Result<()> {
        let limit = match more {
            Some(more) => self.used_memory()? + f64::from(more),
            None => 0.0,
        };
        self.command(&["CONFIG", "SET", "maxmemory", &format!("{limit:.0}")])
            .map(drop)
    }

    /// Lets the server answer no other client for a while.
    pub(crate) fn pause(&mut self, time: Duration) -> anyhow::Result<()> {
        self.command(&["CLIENT", "PAUSE", &time.as_millis().to_string(), "ALL"])
            .map(drop)
    }

    /// The number of members of a sorted set.
    pub(crate) fn members(&mut self, key: &str) -> anyhow::Result<u64> {
        Ok(self.command(&["ZCARD", key])?.parse()?)
    }

    fn info(&mut self, section: &str, field: &str) -> anyhow::Result<String> {
        let info = self.command(&["INFO", section])?;
        let mut lines = info.lines().filter_map(|line| line.split_once(':'));
        let found = lines.find(|(name, _)| *name == field);
        Ok(found.with_context(|| format!("no {field}"))?.1.trim().to_owned())
    }

    /// Memory that Redis uses, in bytes.
    pub(crate) fn used_memory(&mut self) -> anyhow::Result<f64> {
        Ok(self.info("memory", "used_memory")?.parse()?)
    }

    pub(crate) fn version(&mut self) -> anyhow::Result<String> {
        self.info("server", "redis_version")
    }
}
