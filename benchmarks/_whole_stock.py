"""A stock fine-tuning script as a user writes it: the Trainer in bf16, to be timed beside memfit.

    python _whole_stock.py reviews.csv MODEL OUTPUT EPOCHS LENGTH

Pads each batch to its longest row, evaluates after each epoch, saves the model at the end, writes
no checkpoints. Prints a line of JSON for benchmarks/whole_runs.py.
"""

import csv
import json
import sys
import time

import torch
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import train_test_split
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

table, name, output, epochs, length = sys.argv[1:]

with open(table, encoding="utf-8", newline="") as file:
    rows = list(csv.DictReader(file))
texts, labels = [row["review"] for row in rows], [int(row["label"]) for row in rows]
train_texts, test_texts, train_labels, test_labels = train_test_split(
    texts, labels, test_size=0.1, stratify=labels, random_state=42
)

tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2, dtype=torch.float32)


class Reviews(torch.utils.data.Dataset):
    def __init__(self, texts, labels):
        self.encoded = tokenizer(texts, truncation=True, max_length=int(length))
        self.labels = labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        row = {key: values[at] for key, values in self.encoded.items()}
        return {**row, "labels": self.labels[at]}


class FirstStep(TrainerCallback):
    started = None

    def on_step_end(self, args, state, control, **kwargs):  # noqa: ARG002
        if self.started is None:
            self.started = time.time()


def metrics(prediction):
    said = prediction.predictions.argmax(-1)
    truth = prediction.label_ids
    return {"f1": f1_score(truth, said), "accuracy": accuracy_score(truth, said)}


on_card = torch.cuda.is_available()
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=output,
        num_train_epochs=float(epochs),
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        learning_rate=2e-5,
        bf16=on_card,
        eval_strategy="epoch",
        save_strategy="no",
        report_to="none",
        seed=42,
    ),
    train_dataset=Reviews(train_texts, train_labels),
    eval_dataset=Reviews(test_texts, test_labels),
    data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=metrics,
    callbacks=[first := FirstStep()],
)
trainer.train()
last_step = time.time()
trainer.save_model(output)
tokenizer.save_pretrained(output)
found = [entry for entry in trainer.state.log_history if "eval_f1" in entry][-1]
print(
    "STOCK "
    + json.dumps(
        {
            "steps": trainer.state.global_step,
            "f1": found["eval_f1"],
            "first_step_at": first.started,
            "last_step_at": last_step,
        }
    )
)
