//! All that is wrong, not only the first of it: whoever mends a file wants to do it once.

use super::SettingError;

/// Mistakes, in the order in which they were met.
#[derive(Debug, Default)]
pub(super) struct Mistakes(Vec<SettingError>);

impl Mistakes {
    /// What was judged to be right; what is wrong is noted.
    pub(super) fn of<T>(&mut self, judged: Result<T, SettingError>) -> Option<T> {
        self.all(judged.map_err(|error| vec![error]))
    }

    /// The same for what may be wrong in several places.
    pub(super) fn all<T>(&mut self, judged: Result<T, Vec<SettingError>>) -> Option<T> {
        judged.map_err(|errors| self.0.extend(errors)).ok()
    }

    /// The whole, unless there was a mistake. Without its whole there was one.
    pub(super) fn or<T>(self, whole: Option<T>) -> Result<T, Vec<SettingError>> {
        whole.filter(|_| self.0.is_empty()).ok_or(self.0)
    }
}

/// Every part, or every mistake.
pub(super) fn collect<T>(judged: impl Iterator<Item = Result<T, SettingError>>) -> Result<Vec<T>, Vec<SettingError>> {
    let mut mistakes = Mistakes::default();
    let right = judged.filter_map(|judged| mistakes.of(judged)).collect();
    mistakes.or(Some(right))
}

/// One of them, for those who only want to know that there is any.
pub(super) fn first(mistakes: Vec<SettingError>) -> SettingError {
    mistakes.into_iter().next().unwrap_or_else(|| SettingError::hidden("settings", "cannot be used"))
}
