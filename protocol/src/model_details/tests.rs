use serde_json::{Value, json};

use super::*;

fn details(entry: impl Into<Value>) -> ModelDetails {
    ModelDetails::listed(&entry.into())
}

fn shown(details: &ModelDetails) -> Value {
    Value::Object(details.fields().clone())
}

fn read(text: &str) -> DetailsByModel {
    serde_json::from_str(text).unwrap()
}

#[test]
fn known_fields_of_each_server_are_kept() {
    for entry in [
        json!({"max_model_len": 40960}),
        json!({"meta": {"n_ctx": 32768, "n_ctx_train": 131_072, "n_params": 7_615_616_512_u64}}),
        json!({"max_context_length": 131_072, "loaded_context_length": 4096, "capabilities": ["tool_use"]}),
        json!({"context_length": 131_072, "architecture": {"input_modalities": ["text", "image"]},
               "top_provider": {"max_completion_tokens": 8192}, "supported_parameters": ["tools"]}),
        json!({"capabilities": {"vision": true, "function_calling": false}}),
    ] {
        assert_eq!(shown(&details(entry.clone())), entry);
    }
}

#[test]
fn identity_and_unknown_fields_are_left_out() {
    let entry = json!({"id": "x", "object": "y", "created": 1, "owned_by": "z", "type": "model", "display_name": "n",
                       "root": "/models/m", "permission": [], "meta": {"vocab_type": 2, "secret": "s"}, "n_ctx": 1});
    assert_eq!(shown(&details(entry)), json!({"n_ctx": 1}));
}

#[test]
fn only_values_of_other_type_are_left_out() {
    for odd in [
        json!(0),
        json!(-1),
        json!(1.5),
        json!("40960"),
        json!(null),
        json!([1]),
        json!({}),
        json!(true),
        json!(9_007_199_254_740_993_u64),
    ] {
        let entry = json!({"max_model_len": odd, "context_length": 7});
        assert_eq!(shown(&details(entry)), json!({"context_length": 7}), "{odd}");
    }
    for odd in [
        json!("tools"),
        json!([1]),
        json!([""]),
        json!(["a\u{202e}"]),
        json!(["x".repeat(65)]),
        json!(vec!["x"; 65]),
        json!({"a": 1}),
        json!({"a": {"b": true}}),
    ] {
        assert!(details(json!({"capabilities": odd})).is_empty(), "{odd}");
    }
    for no_entry in [json!(null), json!("m"), json!([{"n_ctx": 1}]), json!({"meta": 7}), json!({"meta": {"n_ctx": {}}})]
    {
        assert!(details(no_entry.clone()).is_empty(), "{no_entry}");
    }
}

#[test]
fn details_above_bound_of_model_are_dropped() {
    let names: Vec<String> = (0..64).map(|number| format!("{number:0>64}")).collect();
    assert!(details(json!({"capabilities": names})).is_empty());
    assert!(!details(json!({"capabilities": names[..32]})).is_empty());
}

#[test]
fn smallest_figure_of_workers_is_kept() {
    let mut merged = details(json!({"max_model_len": 40960, "meta": {"n_ctx": 8192, "size": 5}}));
    merged.merge(&details(json!({"max_model_len": 32768, "meta": {"n_ctx": 16384}, "context_length": 9})));
    let expected = json!({"max_model_len": 32768, "meta": {"n_ctx": 8192, "size": 5}, "context_length": 9});
    assert_eq!(shown(&merged), expected);
}

#[test]
fn only_common_capabilities_of_workers_are_kept() {
    let mut names = details(json!({"capabilities": ["vision", "tools", "audio"]}));
    names.merge(&details(json!({"capabilities": ["tools", "vision"]})));
    assert_eq!(shown(&names), json!({"capabilities": ["vision", "tools"]}));
    let mut flags = details(json!({"capabilities": {"vision": true, "tools": true, "own": true}}));
    flags.merge(&details(json!({"capabilities": {"vision": false, "tools": true, "other": true}})));
    assert_eq!(shown(&flags), json!({"capabilities": {"vision": false, "tools": true}}));
    flags.merge(&names);
    assert_eq!(shown(&flags), json!({"capabilities": []}));
}

#[test]
fn merge_result_is_independent_of_order() {
    let all = [
        details(json!({"max_model_len": 3, "capabilities": {"a": true, "b": true}})),
        details(json!({"max_model_len": 2, "meta": {"n_ctx": 5}})),
        details(json!({"n_ctx": 7, "meta": {"n_ctx": 4, "size": 1}, "capabilities": ["a"]})),
        details(json!({"capabilities": ["a"]})),
    ];
    let merge = |order: [usize; 4]| {
        let mut merged = all[order[0]].clone();
        order[1..].iter().for_each(|index| merged.merge(&all[*index]));
        merged
    };
    for order in [[0, 2, 1, 3], [1, 0, 2, 3], [2, 3, 0, 1], [3, 2, 1, 0], [3, 0, 2, 1]] {
        assert_eq!(merge(order), merge([0, 1, 2, 3]), "{order:?}");
    }
}

#[test]
fn declared_fields_replace_those_that_are_listed() {
    let mut listed = details(json!({"max_model_len": 40960, "meta": {"n_ctx": 1, "size": 2}, "capabilities": ["a"]}));
    listed.replace(&details(json!({"max_model_len": 50000, "meta": {"n_ctx": 3}, "capabilities": {"b": true}})));
    let expected = json!({"max_model_len": 50000, "meta": {"n_ctx": 3, "size": 2}, "capabilities": {"b": true}});
    assert_eq!(shown(&listed), expected);
}

#[test]
fn declared_field_that_is_unknown_is_named() {
    let declared = |fields: Value| ModelDetails::declared(fields.as_object().unwrap());
    assert_eq!(
        shown(&declared(json!({"context_length": 5, "meta": {"n_ctx": 1}})).unwrap()),
        json!({"context_length": 5, "meta": {"n_ctx": 1}})
    );
    for (fields, named) in [
        (json!({"contextLength": 5}), "contextLength"),
        (json!({"context_length": "5"}), "context_length"),
        (json!({"n_ctx": 1, "meta": {"n_ctx": 1, "id": 2}}), "meta.id"),
        (json!({"id": "other"}), "id"),
        (json!({"capabilities": {"a": true, "b": 1}}), "capabilities.b"),
    ] {
        let error = declared(fields).unwrap_err();
        assert!(error.starts_with(&format!("{named} is ")), "{error}");
    }
}

#[test]
fn context_in_force_precedes_context_of_training() {
    assert_eq!(details(json!({"meta": {"n_ctx_train": 8, "n_ctx": 4}})).context_length(), Some(4));
    assert_eq!(details(json!({"meta": {"n_ctx_train": 8}, "max_model_len": 5})).context_length(), Some(5));
    assert_eq!(details(json!({"meta": {"size": 8}})).context_length(), None);
}

#[test]
fn unusable_details_in_map_are_skipped() {
    for nonsense in
        ["null", "7", "\"m\"", "[{\"n_ctx\":1}]", "{\"m\":[1]}", "{\"\":{\"n_ctx\":1}}", "{\"a\\u001b\":{\"n_ctx\":1}}"]
    {
        assert!(read(nonsense).is_empty(), "{nonsense}");
    }
    let mixed = read(r#"{"m": {"n_ctx": 4, "id": "x"}, "n": 5, "o": {"n_ctx": "5"}}"#);
    assert_eq!(mixed.of("m").map(shown), Some(json!({"n_ctx": 4})));
    assert!(mixed.of("n").is_none() && mixed.of("o").is_none());
}

#[test]
fn details_of_many_models_are_cut_to_bound() {
    let one = details(json!({"capabilities": vec!["x".repeat(60); 60]}));
    let many: DetailsByModel = (0..200).map(|number| (format!("m{number:0>3}"), one.clone())).collect();
    let written = serde_json::to_string(&many).unwrap();
    assert!(many.of("m000").is_some() && many.of("m199").is_none());
    assert!((MAX_DETAILS_BYTES * 9 / 10..MAX_DETAILS_BYTES * 11 / 10).contains(&written.len()), "{}", written.len());
    assert_eq!(read(&written), many, "cleaning twice changes nothing");
}
