//! Random damage to valid inputs, for decoders of what others have written.
//!
//! An input begins as a valid one, so that most inputs pass the first checks of a decoder. It does not follow the coverage of the
//! code as cargo-fuzz does, which needs a nightly toolchain.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use fastrand::Rng;

use crate::chaos_random;

/// The number of inputs in a test that runs with all others.
pub const FEW: u32 = 2_000;
/// Longer inputs are cut off.
const MAX_LENGTH: usize = 8 * 1024;
/// The maximum number of changes of an input.
const MAX_CHANGES: usize = 5;
/// Bytes with a meaning in text, JSON or a binary encoding.
const SPECIAL: &[u8] = b"\x00\x01\x7f\x80\xff\"\\{}[]:,/~-+.0189eETZ% \r\n";

/// Calls `check` with this many inputs, each a valid one with a few random changes. The first inputs are the valid ones
/// themselves.
///
/// # Panics
/// If `check` panics. The input is printed.
#[track_caller]
pub fn fuzz(test: &str, count: u32, valid: &[Vec<u8>], check: impl Fn(&[u8])) {
    let mut first = valid.iter();
    let next = |random: &mut Rng| first.next().cloned().unwrap_or_else(|| damaged(random, valid));
    check_each(test, count, next, check);
}

/// Calls `check` with this many inputs that `generate` returns.
///
/// # Panics
/// If `check` panics. The input is printed.
#[track_caller]
pub fn check_each(
    test: &str,
    count: u32,
    mut generate: impl FnMut(&mut Rng) -> Vec<u8>,
    check: impl Fn(&[u8]),
) {
    let mut random = chaos_random(test);
    for number in 0..count {
        let input = generate(&mut random);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(&input))) {
            println!("{test}: input {number} fails: b\"{}\"", input.escape_ascii());
            resume_unwind(panic);
        }
    }
    println!("{test}: {count} inputs");
}

fn damaged(random: &mut Rng, valid: &[Vec<u8>]) -> Vec<u8> {
    let mut input = one_of(random, valid).clone();
    for _ in 0..random.usize(1..=MAX_CHANGES) {
        change(random, &mut input, valid);
        input.truncate(MAX_LENGTH);
    }
    input
}

fn one_of<'a, T>(random: &mut Rng, all: &'a [T]) -> &'a T {
    &all[random.usize(..all.len())]
}

fn part(random: &mut Rng, input: &[u8]) -> std::ops::Range<usize> {
    let from = random.usize(..=input.len());
    from..random.usize(from..=input.len())
}

fn change(random: &mut Rng, input: &mut Vec<u8>, valid: &[Vec<u8>]) {
    let at = random.usize(..=input.len());
    match random.u8(..8) {
        0 => {
            if let Some(byte) = input.get_mut(at) {
                *byte ^= 1 << random.u8(..8);
            }
        }
        1 => {
            if let Some(byte) = input.get_mut(at) {
                *byte = *one_of(random, SPECIAL);
            }
        }
        2 => input.insert(at, *one_of(random, SPECIAL)),
        3 => {
            let bytes: Vec<u8> = (0..random.usize(..8)).map(|_| random.u8(..)).collect();
            input.splice(at..at, bytes);
        }
        4 => input.truncate(at),
        5 => {
            input.drain(part(random, input));
        }
        // Also nests what is nested.
        6 => {
            let part = part(random, input);
            let times = if random.bool() { 1 } else { random.usize(1..200) };
            let repeated = input[part.clone()].repeat(times.min(1 + MAX_LENGTH / part.len().max(1)));
            input.splice(part.end..part.end, repeated);
        }
        _ => {
            let other = one_of(random, valid);
            let part = part(random, other);
            input.splice(at..at, other[part].iter().copied());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn inputs_begin_with_valid_ones() {
        let valid = [b"{\"a\":1}".to_vec(), b"".to_vec()];
        let seen = RefCell::new(Vec::new());
        fuzz("differ", 1_000, &valid, |input| {
            seen.borrow_mut().push(input.to_vec());
        });
        let seen = seen.into_inner();
        assert_eq!((&seen[..2], seen.len()), (&valid[..], 1_000));
        assert!(seen.iter().all(|input| input.len() <= MAX_LENGTH));
        assert!(seen.into_iter().collect::<HashSet<_>>().len() > 500);
    }
}
