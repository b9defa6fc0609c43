use super::*;
use crate::backend::condition;

fn catalogue() -> Catalogue {
    let metrics = Arc::new(Metrics::new());
    Catalogue::new(Arc::default(), Capacity::new(1), Arc::new(Failing::new(Arc::clone(&metrics))), metrics)
}

fn named(models: &[&str]) -> Advertised {
    let models = models.iter().map(|&model| model.to_owned()).collect();
    Advertised::new(models, &Declared::default(), &Declared::default())
}

fn healthy(catalogue: &Catalogue, models: &[&str]) {
    let models = named(models);
    catalogue.change(|state| {
        let now = Instant::now();
        state.backend.handle_probe(&Health::Alive, now, now);
        state.models = models;
        state.listed = Some(now);
    });
}

#[test]
fn models_are_advertised_only_while_healthy() {
    let catalogue = catalogue();
    catalogue.lock().models = named(&["m"]);
    assert_eq!(catalogue.advertised(), Advertised::default());
    healthy(&catalogue, &["m"]);
    assert_eq!(catalogue.advertised(), named(&["m"]));
    catalogue.handle_unreachable("refused");
    assert!(catalogue.advertised() == Advertised::default() && !*catalogue.healthy().borrow());
}

#[test]
fn failing_model_stays_advertised_until_backend_returns() {
    let catalogue = catalogue();
    healthy(&catalogue, &["m", "n"]);
    let reported = (0..5).map(|_| catalogue.failing.handle_status("m", 500)).filter(|is_changed| *is_changed);
    assert_eq!(reported.count(), 1);
    let advertised = catalogue.advertised();
    assert_eq!(
        (&advertised.models[..], &advertised.failing[..]),
        (&named(&["m", "n"]).models[..], &["m".to_owned()][..])
    );
    catalogue.handle_unreachable("refused");
    healthy(&catalogue, &["m", "n"]);
    assert_eq!(catalogue.advertised(), named(&["m", "n"]));
}

#[test]
fn fixed_model_list_does_not_stop_probes() {
    let catalogue = catalogue();
    let fixed = Models::Fixed(vec!["m".to_owned()]);
    assert_eq!(catalogue.pause(&fixed, false), condition::RECOVERY_INTERVAL);
    healthy(&catalogue, &["m"]);
    assert_eq!(catalogue.pause(&fixed, false), condition::HEALTHY_INTERVAL);
    assert_eq!(catalogue.pause(&fixed, true), condition::RECOVERY_INTERVAL);
    healthy(&catalogue, &[]);
    assert_eq!(catalogue.pause(&Models::Listed, false), FIRST_LIST_INTERVAL);
}

#[test]
fn list_is_due_every_thirty_seconds() {
    let catalogue = catalogue();
    assert!(catalogue.lock().is_list_due(Instant::now()));
    healthy(&catalogue, &["m"]);
    let listed = catalogue.lock().listed.unwrap();
    assert!(!catalogue.lock().is_list_due(listed + LIST_INTERVAL / 2));
    assert!(catalogue.lock().is_list_due(listed + LIST_INTERVAL));
}

#[test]
fn link_registered_with_old_models_receives_update() {
    let catalogue = catalogue();
    healthy(&catalogue, &["m"]);
    let mut announced = None;
    catalogue.attach(&named(&[]), |changed| announced = changed.cloned());
    assert_eq!(announced, Some(named(&["m"])));
    catalogue.attach(&named(&["m"]), |changed| announced = changed.cloned());
    assert_eq!(announced, None);
}
