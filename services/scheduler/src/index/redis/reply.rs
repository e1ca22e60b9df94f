//! The replies of scripts.

use bytes::Bytes;
use fred::prelude::Value;
use redeliver_core::Timestamp;

use crate::index::{Applied, IndexError, flow_key};
use crate::job::{Flow, JobId};

/// The reply of a script, read value by value.
pub(super) struct Reply(std::vec::IntoIter<Value>);

impl From<Vec<Value>> for Reply {
    fn from(values: Vec<Value>) -> Self {
        Self(values.into_iter())
    }
}

impl Reply {
    pub(super) fn is_empty(&self) -> bool {
        self.0.as_slice().is_empty()
    }

    /// Whether the next value is this text.
    pub(super) fn is_word(&self, word: &str) -> bool {
        let next = self.0.as_slice().first();
        next.is_some_and(|value| value.as_bytes() == Some(word.as_bytes()))
    }

    /// The reply, unless the script has refused the caller.
    pub(super) fn checked(mut self) -> Result<Self, IndexError> {
        if self.is_word("FENCED") {
            return Err(IndexError::Fenced);
        }
        if self.is_word("GAP") {
            self.value()?;
            let (found, expected) = (self.optional_number()?, self.number()?);
            return Err(IndexError::Gap { found, expected });
        }
        Ok(self)
    }

    pub(super) fn value(&mut self) -> Result<Value, IndexError> {
        self.0.next().ok_or_else(|| unexpected("too few values"))
    }

    pub(super) fn word(&mut self) -> Result<String, IndexError> {
        let value = self.value()?;
        value.into_string().ok_or_else(|| unexpected("not a string"))
    }

    pub(super) fn number(&mut self) -> Result<i64, IndexError> {
        let value = self.value()?;
        value.as_i64().ok_or_else(|| unexpected("not a number"))
    }

    pub(super) fn count(&mut self) -> Result<u64, IndexError> {
        u64::try_from(self.number()?).map_err(|_| unexpected("a negative number"))
    }

    pub(super) fn optional_number(&mut self) -> Result<Option<i64>, IndexError> {
        if self.0.as_slice().first().is_some_and(Value::is_null) {
            self.value()?;
            return Ok(None);
        }
        self.number().map(Some)
    }

    pub(super) fn bytes(&mut self) -> Result<Bytes, IndexError> {
        self.optional_bytes()?.ok_or_else(|| unexpected("not bytes"))
    }

    pub(super) fn optional_bytes(&mut self) -> Result<Option<Bytes>, IndexError> {
        match self.value()? {
            Value::Null => Ok(None),
            value => match value.into_bytes() {
                Some(bytes) => Ok(Some(bytes)),
                None => Err(unexpected("not bytes")),
            },
        }
    }

    pub(super) fn id(&mut self) -> Result<JobId, IndexError> {
        let bytes: Result<[u8; 16], _> = self.bytes()?.as_ref().try_into();
        bytes
            .map(JobId::from_bytes)
            .map_err(|_| unexpected("not a job id"))
    }

    /// The remaining values, which are ids.
    pub(super) fn ids(&mut self) -> Result<Vec<JobId>, IndexError> {
        let mut ids = Vec::new();
        while !self.is_empty() {
            ids.push(self.id()?);
        }
        Ok(ids)
    }

    /// The item whose number, from 1 on, is the value.
    pub(super) fn item_of<'a, T>(&mut self, items: &'a [T]) -> Result<&'a T, IndexError> {
        let number = usize::try_from(self.number()?).unwrap_or_default();
        let item = number.checked_sub(1).and_then(|index| items.get(index));
        item.ok_or_else(|| unexpected("a number out of range"))
    }

    pub(super) fn flow(&mut self) -> Result<Flow, IndexError> {
        let bytes = self.bytes()?;
        let flow = std::str::from_utf8(&bytes).ok().and_then(flow_key::decode);
        flow.ok_or_else(|| unexpected("not a flow"))
    }

    /// The offset of the checkpoint and its time, with which the reply of each query begins.
    pub(super) fn applied(&mut self) -> Result<Option<Applied>, IndexError> {
        let (offset, at) = (self.optional_number()?, self.optional_number()?);
        Ok(offset.zip(at).map(|(offset, at)| Applied {
            offset,
            at: Timestamp::from_millis(at),
        }))
    }
}

pub(super) fn unexpected(found: &str) -> IndexError {
    IndexError::Unavailable(format!("unexpected reply of a script: {found}"))
}
