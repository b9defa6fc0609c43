//! The canonical text of a value: its `Debug` text with relative times and ordered keys.
//!
//! From the text and not field by field, so that a new field is part of the state without a change here. What a state
//! may leave out is listed by name, each with a reason, next to the world that leaves it out.
//!
//! - A time becomes the time from now. One that has passed can be clamped: it is as old as everything older.
//! - Keys become their rank among the keys of their type: worlds whose keys have the same order behave the same,
//!   because keys are only compared and never reused. 0 stays 0.

use std::time::Instant;

/// How to treat a field, or a type of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Leaves the field out, with everything in it.
    Skip,
    /// Replaces a number by its rank among all of this name.
    Rank,
    /// Replaces a number by its rank among all fields with this rule and text: numbers of one counter in different
    /// fields.
    RankAs(&'static str),
    /// Replaces a number by its rank among those of this name in its struct of [`Canonical::scopes`].
    RankInScope,
    /// An [`Instant`], or a type of one number that counts nanoseconds: relative to now, and at most this many
    /// milliseconds old.
    Age(i64),
}

/// Turns texts into canonical ones.
#[derive(Clone, Debug, Default)]
pub struct Canonical {
    /// Rules for the fields with these names.
    pub fields: &'static [(&'static str, Rule)],
    /// Rules for the tuple structs with these names, such as `RequestKey(7)`.
    pub types: &'static [(&'static str, Rule)],
    /// Structs in each of which numbers have ranks of their own.
    pub scopes: &'static [&'static str],
}

/// A number whose rank is not known before the end.
struct Ranked {
    at: usize,
    scope: usize,
    rule: &'static str,
    value: u64,
}

struct Scan<'a> {
    rules: &'a Canonical,
    text: &'a str,
    at: usize,
    now: i64,
    nanos: i64,
    field: &'a str,
    scope: usize,
    out: String,
    ranked: Vec<Ranked>,
}

impl Canonical {
    /// Returns the canonical text of a `Debug` text. `nanos` is now on the clock of number types with [`Rule::Age`].
    #[must_use]
    pub fn text(&self, text: &str, now: Instant, nanos: i64) -> String {
        let (out, ranked) = (String::with_capacity(text.len()), Vec::new());
        let mut scan = Scan { rules: self, text, at: 0, now: 0, nanos, field: "", scope: 0, out, ranked };
        scan.now = instant(&format!("{now:?}")).map_or(0, |(now, _)| now);
        while scan.at < text.len() {
            scan.step();
        }
        scan.finish()
    }
}

impl Scan<'_> {
    fn step(&mut self) {
        let rest = &self.text[self.at..];
        let first = rest.as_bytes()[0];
        match first {
            b'a'..=b'z' | b'A'..=b'Z' | b'_' => self.word(),
            b'"' => self.copy(string_len(rest)),
            b'0'..=b'9' => self.number(),
            _ => self.copy(rest.chars().next().map_or(1, char::len_utf8)),
        }
    }

    fn copy(&mut self, len: usize) {
        self.out.push_str(&self.text[self.at..self.at + len]);
        self.at += len;
    }

    fn word(&mut self) {
        let rest = &self.text[self.at..];
        let len = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (word, after) = rest.split_at(len);
        if let Some((time, len)) = (word == "Instant").then(|| instant(rest)).flatten() {
            let most = self.age().unwrap_or(i64::MAX);
            self.time(time - self.now, most);
            self.at += len;
        } else if after.starts_with(": ") {
            self.field = word;
            self.copy(len + 2);
            if self.rule() == Some(Rule::Skip) {
                self.at += value_len(&self.text[self.at..]);
            }
        } else if let Some((name, rule)) = self.rules.types.iter().find(|(name, _)| *name == word)
            && after.starts_with('(')
        {
            self.copy(len + 1);
            self.typed(name, *rule);
        } else {
            self.scope += usize::from(self.rules.scopes.contains(&word));
            self.copy(len);
        }
    }

    fn typed(&mut self, name: &'static str, rule: Rule) {
        let rest = &self.text[self.at..];
        let len = rest.find(')').unwrap_or(rest.len());
        match (rule, rest[..len].parse::<i64>()) {
            (Rule::Rank, Ok(value)) => self.rank(name, value.unsigned_abs(), 0),
            (Rule::Age(most), Ok(value)) => self.time(value - self.nanos, self.age().unwrap_or(most)),
            (Rule::Skip | Rule::Rank | Rule::RankAs(_) | Rule::RankInScope | Rule::Age(_), _) => return self.copy(len),
        }
        self.at += len;
    }

    fn number(&mut self) {
        let rest = &self.text[self.at..];
        let len = rest.find(|c: char| c.is_ascii_punctuation() && c != '.' || c == ' ').unwrap_or(rest.len());
        let is_ranked = |rule: &Rule| matches!(rule, Rule::Rank | Rule::RankAs(_) | Rule::RankInScope);
        let found = self.rules.fields.iter().find(|(name, rule)| *name == self.field && is_ranked(rule));
        match (found, rest[..len].parse::<u64>()) {
            (Some((name, rule)), Ok(value)) => {
                let name = if let Rule::RankAs(counter) = rule { counter } else { name };
                self.rank(name, value, if *rule == Rule::RankInScope { self.scope } else { 0 });
                self.at += len;
            }
            (None, _) | (_, Err(_)) => self.copy(len),
        }
    }

    fn rule(&self) -> Option<Rule> {
        self.rules.fields.iter().find(|(name, _)| *name == self.field).map(|(_, rule)| *rule)
    }

    fn age(&self) -> Option<i64> {
        match self.rule() {
            Some(Rule::Age(most)) => Some(most),
            Some(Rule::Skip | Rule::Rank | Rule::RankAs(_) | Rule::RankInScope) | None => None,
        }
    }

    /// `most` is in milliseconds.
    fn time(&mut self, from_now: i64, most: i64) {
        let time = from_now.max(most.saturating_mul(-1_000_000));
        self.out.push_str(&format!("@{time}"));
    }

    fn rank(&mut self, rule: &'static str, value: u64, scope: usize) {
        if value == 0 {
            self.out.push('0');
        } else {
            self.ranked.push(Ranked { at: self.out.len(), scope, rule, value });
        }
    }

    /// Fills in the ranks.
    fn finish(self) -> String {
        let key = |ranked: &Ranked| (ranked.rule, ranked.scope, ranked.value);
        let mut all: Vec<_> = self.ranked.iter().map(key).collect();
        all.sort_unstable();
        all.dedup();
        let (mut out, mut from) = (String::with_capacity(self.out.len()), 0);
        for ranked in &self.ranked {
            let first = all.partition_point(|other| (other.0, other.1) < (ranked.rule, ranked.scope));
            let rank = all.partition_point(|other| *other <= key(ranked)) - first;
            out.push_str(&self.out[from..ranked.at]);
            out.push_str(&format!("#{rank}"));
            from = ranked.at;
        }
        out.push_str(&self.out[from..]);
        out
    }
}

/// Returns the nanoseconds of an instant at the beginning of a text, and its length there.
///
/// Only where instants are counted in seconds and nanoseconds, as on all kinds of Unix.
fn instant(text: &str) -> Option<(i64, usize)> {
    let rest = text.strip_prefix("Instant { tv_sec: ")?;
    let (secs, rest) = rest.split_once(", tv_nsec: ")?;
    let (nanos, rest) = rest.split_once(" }")?;
    Some((secs.parse::<i64>().ok()? * 1_000_000_000 + nanos.parse::<i64>().ok()?, text.len() - rest.len()))
}

/// Returns the length of a text in quotes.
fn string_len(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        if c == '"' && !is_escaped {
            return at + 1;
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    text.len()
}

/// Returns the length of the value at the beginning of a text.
fn value_len(text: &str) -> usize {
    let (mut depth, mut at) = (0_u32, 0);
    while at < text.len() {
        match text.as_bytes()[at] {
            b'"' => {
                at += string_len(&text[at..]);
                continue;
            }
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' if depth == 0 => return at,
            b')' | b']' | b'}' => depth -= 1,
            b',' if depth == 0 => return at,
            _ => {}
        }
        at += 1;
    }
    at
}
