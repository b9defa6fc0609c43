//! Suggestions for unknown model names.

/// The number of suggestions.
const SHOWN: usize = 3;

/// Longer names are not compared: the cost is the square of the length.
const MAX_COMPARED_CHARS: usize = 64;

/// The names nearest to the requested one, best first; distant ones are left out.
pub fn nearest<'a>(requested: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let requested: Vec<char> = requested.to_lowercase().chars().collect();
    if requested.len() > MAX_COMPARED_CHARS {
        return Vec::new();
    }
    let mut near: Vec<(usize, &str)> = names.filter_map(|name| Some((distance_to(&requested, name)?, name))).collect();
    near.sort_unstable();
    near.into_iter().take(SHOWN).map(|(_, name)| name).collect()
}

/// The distance of a name from the requested one, in letters; `None` if it is too far.
fn distance_to(requested: &[char], name: &str) -> Option<usize> {
    let name: Vec<char> = name.to_lowercase().chars().take(MAX_COMPARED_CHARS + 1).collect();
    if name.len() > MAX_COMPARED_CHARS {
        return None;
    }
    let distance = edits(requested, &name);
    let (short, long) = if requested.len() < name.len() { (requested, &*name) } else { (&*name, requested) };
    // `llama3.2` for `llama3.2:3b-instruct`, or the reverse, is near, however much is missing.
    let is_part = short.len() >= 3 && long.windows(short.len()).any(|part| part == short);
    (is_part || distance <= long.len() / 3).then_some(distance)
}

/// The number of letters to change, add or leave out (Levenshtein).
fn edits(a: &[char], b: &[char]) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (line, from) in a.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], line + 1);
        for (column, to) in b.iter().enumerate() {
            let changed = diagonal + usize::from(from != to);
            diagonal = row[column + 1];
            row[column + 1] = changed.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: [&str; 5] = ["qwen3:8b", "qwen3:32b", "llama3.2:3b-instruct", "nomic-embed-text", "Mistral-7B"];

    fn near(requested: &str) -> Vec<&'static str> {
        nearest(requested, NAMES.into_iter())
    }

    #[test]
    fn misspelt_name_finds_nearest_names_first() {
        assert_eq!(near("qwen3:9b"), ["qwen3:8b", "qwen3:32b"]);
        assert_eq!(near("mistral-7b"), ["Mistral-7B"]);
    }

    #[test]
    fn partial_name_finds_full_name() {
        assert_eq!(near("llama3.2"), ["llama3.2:3b-instruct"]);
        assert_eq!(near("ollama/nomic-embed-text"), ["nomic-embed-text"]);
    }

    #[test]
    fn unrelated_name_finds_nothing() {
        assert!(near("gpt-4o").is_empty() && near("").is_empty() && near(&"q".repeat(1 << 20)).is_empty());
    }

    #[test]
    fn edits_are_counted_as_letters() {
        let chars = |text: &str| text.chars().collect::<Vec<_>>();
        assert_eq!(edits(&chars("kitten"), &chars("sitting")), 3);
        assert_eq!(edits(&[], &chars("ab")), 2);
    }
}
