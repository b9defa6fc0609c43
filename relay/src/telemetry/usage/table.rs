//! Sums per day, key and model, bounded.
//!
//! Keys are created by admins and models are listed by workers, but both may be many. Beyond [`Bounds::day_rows`] rows
//! of a day, further models of a key are one row, `other`; beyond twice as many, further keys are one row too. Beyond
//! [`Bounds::rows`], the oldest day is forgotten.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::day::Day;
use super::sums::UsageSums;

/// Stands for models that no worker has listed, and for models and keys beyond the bounds.
pub const OTHER: &str = "other";

/// The most rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Of a day, without the rows `other`, which are at most as many again.
    pub(super) day_rows: usize,
    /// Of all days, unless one day alone has more.
    pub(super) rows: usize,
}

impl Default for Bounds {
    /// A row uses about 200 bytes, so all of them use 40 MB.
    fn default() -> Self {
        Self { day_rows: 10_000, rows: 200_000 }
    }
}

/// The key and the model of a row.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RowKey {
    /// The id of the API key; `None` for requests without one.
    pub key_id: Option<Arc<str>>,
    /// The model as workers list it, or [`OTHER`].
    pub model: Arc<str>,
}

/// A row as it is stored and shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRow<'a> {
    /// The day.
    pub day: Day,
    /// The id of the API key; `None` for requests without one.
    #[serde(borrow)]
    pub key_id: Option<Cow<'a, str>>,
    /// The key's name.
    #[serde(borrow)]
    pub key: Option<Cow<'a, str>>,
    /// The model.
    #[serde(borrow)]
    pub model: Cow<'a, str>,
    /// The sums.
    #[serde(flatten)]
    pub sums: UsageSums,
}

/// The rows to show; all that match every given filter.
#[derive(Clone, Debug, Default)]
pub struct UsageFilter {
    /// The first day.
    pub since: Option<Day>,
    /// The last day.
    pub until: Option<Day>,
    /// The id or the name of a key.
    pub key: Option<String>,
    /// A model.
    pub model: Option<String>,
}

type DayRows = BTreeMap<RowKey, UsageSums>;

/// Sums per day, key and model. A clone shares the rows of each day until one of them changes.
#[derive(Clone, Debug, Default)]
pub struct UsageTable {
    days: BTreeMap<Day, Arc<DayRows>>,
    /// Names of keys by id, so that a key is named after the keys' store has forgotten it.
    names: Arc<BTreeMap<Arc<str>, Arc<str>>>,
    rows: usize,
    bounds: Bounds,
}

impl UsageTable {
    #[cfg(test)]
    pub(super) fn with_bounds(bounds: Bounds) -> Self {
        Self { bounds, ..Self::default() }
    }

    /// True if it has no rows.
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.rows
    }

    /// The oldest day.
    pub fn first_day(&self) -> Option<Day> {
        self.days.keys().next().copied()
    }

    /// Adds to a row. `name` is that of the row's key. Returns the day that was forgotten for the room, if any.
    pub fn add(&mut self, day: Day, key: RowKey, name: Option<&str>, sums: &UsageSums) -> Option<Day> {
        let rows = Arc::make_mut(self.days.entry(day).or_default());
        let key = within_bounds(rows, key, self.bounds.day_rows);
        if let (Some(id), Some(name)) = (&key.key_id, name)
            && self.names.get(id).is_none_or(|known| **known != *name)
        {
            let name = if **id == *OTHER { OTHER } else { name };
            Arc::make_mut(&mut self.names).insert(Arc::clone(id), name.into());
        }
        let before = rows.len();
        *rows.entry(key).or_default() += sums;
        self.rows += rows.len() - before;
        if self.rows > self.bounds.rows && self.days.len() > 1 { self.forget_first() } else { None }
    }

    /// Adds all rows of another table. Returns the last day that was forgotten for the room, if any.
    pub fn merge(&mut self, other: &Self) -> Option<Day> {
        let mut forgotten = None;
        for (day, rows) in &other.days {
            for (key, sums) in rows.iter() {
                let name = key.key_id.as_ref().and_then(|id| other.names.get(id));
                let gone = self.add(*day, key.clone(), name.map(|name| &**name), sums);
                forgotten = gone.or(forgotten);
            }
        }
        forgotten
    }

    /// Deletes all days before `first`, and names that no row needs.
    pub fn expire(&mut self, first: Day) {
        if self.first_day().is_none_or(|day| day >= first) {
            return;
        }
        self.days = self.days.split_off(&first);
        self.rows = self.days.values().map(|rows| rows.len()).sum();
        self.drop_unused_names();
    }

    /// The tokens of a key on a day, over all models.
    pub fn tokens_of(&self, day: Day, key_id: &Arc<str>) -> u64 {
        let Some(rows) = self.days.get(&day) else { return 0 };
        let first = RowKey { key_id: Some(Arc::clone(key_id)), model: "".into() };
        let of_key = rows.range(first..).take_while(|(row, _)| row.key_id.as_ref() == Some(key_id));
        of_key.fold(0, |sum, (_, sums)| sum.saturating_add(sums.tokens()))
    }

    /// The rows that match, by day, key and model.
    pub fn rows<'a>(&'a self, filter: &'a UsageFilter) -> impl Iterator<Item = UsageRow<'a>> {
        let is_in_time =
            |day: Day| filter.since.is_none_or(|since| day >= since) && filter.until.is_none_or(|until| day <= until);
        let days = self.days.iter().filter(move |(day, _)| is_in_time(**day));
        let rows = days.flat_map(move |(day, rows)| rows.iter().map(move |(key, sums)| self.row(*day, key, sums)));
        rows.filter(move |row| {
            let is_key = |wanted: &String| [&row.key_id, &row.key].into_iter().flatten().any(|name| **name == **wanted);
            filter.key.as_ref().is_none_or(is_key) && filter.model.as_ref().is_none_or(|model| row.model == **model)
        })
    }

    fn row<'a>(&'a self, day: Day, key: &'a RowKey, sums: &UsageSums) -> UsageRow<'a> {
        let id = key.key_id.as_deref();
        let name = id.and_then(|id| self.names.get(id));
        UsageRow {
            day,
            key_id: id.map(Cow::Borrowed),
            key: name.map(|name| Cow::Borrowed(&**name)),
            model: Cow::Borrowed(&key.model),
            sums: *sums,
        }
    }

    fn forget_first(&mut self) -> Option<Day> {
        let (day, rows) = self.days.pop_first()?;
        self.rows -= rows.len();
        self.drop_unused_names();
        Some(day)
    }

    fn drop_unused_names(&mut self) {
        let used: BTreeSet<&Arc<str>> =
            self.days.values().flat_map(|rows| rows.keys()).filter_map(|key| key.key_id.as_ref()).collect();
        if used.len() < self.names.len() {
            let names = self.names.iter().filter(|(id, _)| used.contains(id));
            self.names = Arc::new(names.map(|(id, name)| (Arc::clone(id), Arc::clone(name))).collect());
        }
    }
}

/// Returns the row in which a request is counted.
fn within_bounds(rows: &DayRows, key: RowKey, most: usize) -> RowKey {
    if rows.len() < most || rows.contains_key(&key) {
        return key;
    }
    let of_key = RowKey { model: OTHER.into(), ..key };
    if rows.len() < 2 * most || rows.contains_key(&of_key) {
        return of_key;
    }
    RowKey { key_id: Some(OTHER.into()), ..of_key }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::usage::sums::RequestCounts;

    fn day(number: u32) -> Day {
        Day::parse(&format!("2026-11-{number:02}")).unwrap()
    }

    fn key(id: &str, model: &str) -> RowKey {
        RowKey { key_id: (!id.is_empty()).then(|| id.into()), model: model.into() }
    }

    fn tokens(input_tokens: u64) -> UsageSums {
        let requests = RequestCounts { answered: 1, ..RequestCounts::default() };
        UsageSums { requests, input_tokens, ..UsageSums::default() }
    }

    fn shown(table: &UsageTable, filter: &UsageFilter) -> Vec<String> {
        let show = |row: UsageRow<'_>| {
            let [id, name] = [&row.key_id, &row.key].map(|text| text.as_deref().unwrap_or("-").to_owned());
            let day = row.day.to_string();
            format!("{} {id} {name} {} {}", &day[8..], row.model, row.sums.input_tokens)
        };
        table.rows(filter).map(show).collect()
    }

    #[test]
    fn requests_are_summed_per_day_key_and_model() {
        let mut table = UsageTable::default();
        for (number, id, name, model, input) in [
            (2, "k1", Some("laptop"), "m", 1),
            (1, "k1", Some("laptop"), "m", 2),
            (1, "k1", Some("laptop"), "m", 4),
            (1, "k1", Some("laptop"), "n", 8),
            (1, "k2", Some("phone"), "m", 16),
            (1, "", None, "m", 32),
        ] {
            assert_eq!(table.add(day(number), key(id, model), name, &tokens(input)), None);
        }
        let all = ["01 - - m 32", "01 k1 laptop m 6", "01 k1 laptop n 8", "01 k2 phone m 16", "02 k1 laptop m 1"];
        assert_eq!(shown(&table, &UsageFilter::default()), all);
        assert_eq!(table.len(), 5);
        let filter = UsageFilter { since: Some(day(1)), until: Some(day(1)), ..UsageFilter::default() };
        assert_eq!(shown(&table, &filter), all[..4]);
        for wanted in ["k1", "laptop"] {
            let filter = UsageFilter { key: Some(wanted.to_owned()), model: Some("m".to_owned()), ..filter.clone() };
            assert_eq!(shown(&table, &filter), all[1..2]);
        }
    }

    #[test]
    fn tokens_of_key_are_summed_over_models() {
        let mut table = UsageTable::default();
        let one = UsageSums { output_tokens: 1, estimated_output_tokens: 8, ..tokens(2) };
        for (number, id, model) in [(1, "k1", "m"), (2, "k0", "m"), (2, "k1", "m"), (2, "k1", "n"), (2, "k2", "m")] {
            table.add(day(number), key(id, model), None, &one);
        }
        let sum = |number, id: &str| table.tokens_of(day(number), &id.into());
        assert_eq!([sum(1, "k1"), sum(2, "k1"), sum(2, "k3"), sum(3, "k1")], [11, 22, 0, 0]);
    }

    #[test]
    fn merged_tables_have_sums_of_both() {
        let (mut one, mut two) = (UsageTable::default(), UsageTable::default());
        one.add(day(1), key("k1", "m"), Some("old name"), &tokens(1));
        two.add(day(1), key("k1", "m"), Some("new name"), &tokens(2));
        two.add(day(2), key("", "m"), None, &tokens(4));
        let before = one.clone();
        one.merge(&two);
        assert_eq!(shown(&one, &UsageFilter::default()), ["01 k1 new name m 3", "02 - - m 4"]);
        // A clone does not change with the table.
        assert_eq!(shown(&before, &UsageFilter::default()), ["01 k1 old name m 1"]);
    }

    #[test]
    fn models_and_keys_beyond_bounds_are_other() {
        let mut table = UsageTable::with_bounds(Bounds { day_rows: 2, rows: 100 });
        for number in 0..20 {
            table.add(day(1), key("k", &format!("m{number:02}")), Some("name"), &tokens(1));
        }
        assert_eq!(
            shown(&table, &UsageFilter::default()),
            ["01 k name m00 1", "01 k name m01 1", "01 k name other 18"]
        );
        for number in 0..20 {
            table.add(day(1), key(&format!("key{number:02}"), "m"), Some("another"), &tokens(1));
        }
        let all = shown(&table, &UsageFilter::default());
        assert_eq!(all[2..], ["01 k name other 18", "01 key00 another other 1", "01 other other other 19"]);
        // Another day has room again.
        table.add(day(2), key("k", "m19"), Some("name"), &tokens(1));
        assert_eq!(shown(&table, &UsageFilter::default()).last().unwrap(), "02 k name m19 1");
    }

    #[test]
    fn oldest_day_is_forgotten_beyond_all_rows() {
        let mut table = UsageTable::with_bounds(Bounds { day_rows: 10, rows: 4 });
        let add = |table: &mut UsageTable, number| {
            table.add(day(number), key("k", &format!("m{}", table.len())), None, &tokens(1))
        };
        let forgotten: Vec<_> = [1, 1, 2, 2, 3].map(|number| add(&mut table, number)).into_iter().flatten().collect();
        assert_eq!((forgotten, table.len(), table.first_day()), (vec![day(1)], 3, Some(day(2))));
        // The only day is not forgotten.
        let mut table = UsageTable::with_bounds(Bounds { day_rows: 10, rows: 4 });
        assert!((0..9).all(|_| add(&mut table, 1).is_none()));
        assert_eq!(table.len(), 9);
    }

    #[test]
    fn expired_days_and_their_names_are_deleted() {
        let mut table = UsageTable::default();
        table.add(day(1), key("k1", "m"), Some("gone"), &tokens(1));
        table.add(day(2), key("k2", "m"), Some("kept"), &tokens(1));
        table.expire(day(2));
        assert_eq!((shown(&table, &UsageFilter::default()), table.len()), (vec!["02 k2 kept m 1".to_owned()], 1));
        assert_eq!(table.names.len(), 1);
    }
}
