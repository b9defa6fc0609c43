//! Tables that programs write into pages of documentation, between two marks.

/// Writes each named text into the page at `path`, between its marks `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
pub fn write(path: &str, texts: &[(&str, String)]) -> Result<(), String> {
    let mut page = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    for (name, text) in texts {
        page = put(&page, name, text).ok_or_else(|| format!("{path}: the marks of table {name} are missing"))?;
    }
    std::fs::write(path, page).map_err(|error| format!("{path}: {error}"))
}

fn put(page: &str, name: &str, text: &str) -> Option<String> {
    let (begin, end) = (format!("<!-- {name}: begin -->\n"), format!("<!-- {name}: end -->\n"));
    let (before, rest) = page.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some(format!("{before}{begin}{text}{end}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_table_replaces_previous_one() {
        let page = "a\n<!-- t: begin -->\nold\n<!-- t: end -->\nb\n";
        let written = put(page, "t", "new\n").unwrap();
        assert_eq!(written, "a\n<!-- t: begin -->\nnew\n<!-- t: end -->\nb\n");
        assert_eq!(put(&written, "t", "new\n").unwrap(), written);
        assert_eq!(put(page, "other", ""), None);
    }
}
