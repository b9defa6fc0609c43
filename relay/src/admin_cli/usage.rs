//! The command `usage`: the ledger as sums in a table, or all rows as JSON or CSV.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::Duration;

use modelrelay_protocol::names::marked;
use serde_json::Value;

use super::api::Api;
use super::tables::{cut, rounded, table, word};
use super::{AdminCliError, json_text, list};
use crate::settings::commands::{UsageArgs, UsageFormat};

/// The numbers of a row, as the admin API names them, in the order of the columns.
const NUMBERS: [[&str; 2]; 11] = [
    ["requests", "answered"],
    ["requests", "failed"],
    ["requests", "cancelled"],
    ["requests", "refused"],
    ["input_tokens", ""],
    ["cached_tokens", ""],
    ["output_tokens", ""],
    ["estimated_input_tokens", ""],
    ["estimated_output_tokens", ""],
    ["slot_seconds", ""],
    ["wait_seconds", ""],
];

/// Reads the rows from the relay.
pub(super) async fn read(api: &Api, wanted: &UsageArgs) -> Result<Value, AdminCliError> {
    let UsageArgs { key, model, since, until, .. } = wanted;
    let query = [("key", key), ("model", model), ("since", since), ("until", until)];
    api.query("/admin/usage", &query.map(|(name, value)| (name, value.as_deref()))).await
}

/// The output of the command.
pub(super) fn shown(answer: &Value, wanted: &UsageArgs, output: UsageFormat) -> String {
    match output {
        UsageFormat::Json => json_text(answer),
        UsageFormat::Csv => csv(answer),
        UsageFormat::Table => {
            let mut text = sums(answer, wanted);
            if answer["stored"] == false {
                text.push_str(&format!("\nin memory only, since {}; USAGE_FILE stores it\n", word(&answer["since"])));
            }
            text
        }
    }
}

/// One line per key and, if wanted, per day and model.
fn sums(answer: &Value, wanted: &UsageArgs) -> String {
    let mut groups: BTreeMap<[String; 4], [f64; NUMBERS.len()]> = BTreeMap::new();
    for row in list(answer, "usage") {
        let day = if wanted.daily { word(&row["day"]) } else { String::new() };
        let model = if wanted.models { cut(&word(&row["model"])) } else { String::new() };
        let sums = groups.entry([day, cut(&word(&row["key"])), word(&row["key_id"]), model]).or_default();
        for (sum, number) in sums.iter_mut().zip(numbers(row)) {
            *sum += number.as_f64().unwrap_or_default();
        }
    }
    let lines = groups.into_iter().map(|([day, key, id, model], sums)| {
        let counts = sums[..9].iter().map(|sum| format!("{sum:.0}"));
        let times = sums[9..].iter().map(|sum| rounded(Duration::try_from_secs_f64(*sum).unwrap_or_default()));
        let grouped = wanted.daily.then_some(day).into_iter().chain([key, id]).chain(wanted.models.then_some(model));
        grouped.chain(counts).chain(times).collect()
    });
    let mut names = Vec::new();
    names.extend(wanted.daily.then_some("DAY"));
    names.extend(["KEY", "ID"]);
    names.extend(wanted.models.then_some("MODEL"));
    names.extend([
        "ANSWERED",
        "FAILED",
        "CANCELLED",
        "REFUSED",
        "INPUT",
        "CACHED",
        "OUTPUT",
        "INPUT EST.",
        "OUTPUT EST.",
    ]);
    names.extend(["SLOTS HELD", "WAITED"]);
    table(&names, lines)
}

fn csv(answer: &Value) -> String {
    let columns = NUMBERS.iter().map(|[outer, inner]| if inner.is_empty() { *outer } else { *inner });
    let mut text = ["day", "key_id", "key", "model"].into_iter().chain(columns).collect::<Vec<_>>().join(",");
    text.push_str("\r\n");
    for row in list(answer, "usage") {
        let names = ["day", "key_id", "key", "model"].map(|name| cell(row[name].as_str().unwrap_or_default()));
        let cells: Vec<_> = names.into_iter().chain(numbers(row).map(ToString::to_string)).collect();
        text.push_str(&cells.join(","));
        text.push_str("\r\n");
    }
    text
}

fn numbers(row: &Value) -> impl Iterator<Item = &Value> {
    NUMBERS.iter().map(|[outer, inner]| if inner.is_empty() { &row[*outer] } else { &row[*outer][*inner] })
}

/// A text as a cell. A spreadsheet would take one that begins like a formula for one.
fn cell(text: &str) -> String {
    let mut text = Cow::from(marked(text));
    if text.starts_with(['=', '+', '-', '@']) {
        text.to_mut().insert(0, '\'');
    }
    if text.contains(['"', ',']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.into_owned() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn row(day: &str, key: &str, model: &str, input: u64) -> Value {
        json!({"day": day, "key_id": format!("id-{key}"), "key": key, "model": model,
            "requests": {"answered": 1, "failed": 2, "cancelled": 3, "refused": 4}, "input_tokens": input,
            "cached_tokens": 5, "output_tokens": 6, "estimated_input_tokens": 7, "estimated_output_tokens": 8,
            "slot_seconds": 61.5, "wait_seconds": 0.25})
    }

    fn answer() -> Value {
        let rows = [
            row("2026-11-25", "laptop", "m", 1),
            row("2026-11-25", "phone", "m", 2),
            row("2026-11-26", "laptop", "n", 4),
        ];
        json!({"usage": rows, "stored": true, "since": "2026-11-25T00:00:00Z"})
    }

    fn lines(wanted: &UsageArgs) -> Vec<Vec<String>> {
        let text = shown(&answer(), wanted, UsageFormat::Table);
        let cells =
            |line: &str| line.split("   ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_owned).collect();
        text.lines().map(cells).collect()
    }

    #[test]
    fn table_sums_per_key_unless_more_is_wanted() {
        let all = lines(&UsageArgs::default());
        assert_eq!(all[0][..3], ["KEY", "ID", "ANSWERED"]);
        assert_eq!(all[1], ["laptop", "id-laptop", "2", "4", "6", "8", "5", "10", "12", "14", "16", "2m 3s", "0s"]);
        assert_eq!(all[2][..7], ["phone", "id-phone", "1", "2", "3", "4", "2"]);
        assert_eq!(all.len(), 3);
        let detailed = lines(&UsageArgs { daily: true, models: true, ..UsageArgs::default() });
        assert_eq!(detailed[0][..4], ["DAY", "KEY", "ID", "MODEL"]);
        assert_eq!(detailed[3][..4], ["2026-11-26", "laptop", "id-laptop", "n"]);
        assert_eq!(detailed.len(), 4);
    }

    #[test]
    fn usage_in_memory_is_shown_as_such() {
        let mut answer = answer();
        answer["stored"] = false.into();
        let text = shown(&answer, &UsageArgs::default(), UsageFormat::Table);
        assert!(text.ends_with("in memory only, since 2026-11-25T00:00:00Z; USAGE_FILE stores it\n"), "{text}");
    }

    #[test]
    fn csv_has_every_row_and_no_formula() {
        let rows = [row("2026-11-25", "=1+1", "a,\"b\"", 9)];
        let text = shown(&json!({"usage": rows}), &UsageArgs::default(), UsageFormat::Csv);
        let lines: Vec<_> = text.split("\r\n").collect();
        assert_eq!(
            lines[0],
            "day,key_id,key,model,answered,failed,cancelled,refused,input_tokens,cached_tokens,output_tokens,estimated_input_tokens,estimated_output_tokens,slot_seconds,wait_seconds"
        );
        assert_eq!(lines[1], "2026-11-25,id-=1+1,'=1+1,\"a,\"\"b\"\"\",1,2,3,4,9,5,6,7,8,61.5,0.25");
        assert_eq!(lines[2..], [""]);
    }
}
