"""What is said about tables that cannot be read or learned from, in English and in Chinese."""

from __future__ import annotations

from collections.abc import Mapping

_FILES: Mapping[str, Mapping[str, str]] = {
    "file.none": {
        "en": "there is no file {path}; check the path.{hint}",
        "zh": "没有文件 {path}；请检查路径。{hint}",
    },
    "file.folder": {
        "en": "{path} is a folder; give one of the files in it{inside}",
        "zh": "{path} 是一个文件夹；请给出其中的一个文件{inside}",
    },
    "file.empty": {
        "en": "{path} is empty; give a table with a header and rows",
        "zh": "{path} 是空的；请给出带表头和数据行的表格",
    },
    "file.headless": {
        "en": "{path} is empty; give a table with a header line",
        "zh": "{path} 是空的；请给出带表头的表格",
    },
    "file.link": {
        "en": "{path} is a link to a file that is not there; give the file itself",
        "zh": "{path} 是一个链接，指向的文件不存在；请给出文件本身",
    },
    "file.special": {
        "en": "{path} is not a regular file; write the table to a file first",
        "zh": "{path} 不是普通文件；请先把表格写进文件",
    },
    "file.forbidden": {
        "en": "{path} may not be read; check its permissions",
        "zh": "{path} 不允许读取；请检查它的权限",
    },
    "file.spreadsheet": {
        "en": "{path} is a spreadsheet; save it as CSV (UTF-8) and give that",
        "zh": "{path} 是电子表格；请另存为 CSV（UTF-8）再给出",
    },
    "file.ending": {
        "en": "{path}: cannot tell a table from the ending {ending}; name it {known} or {last}",
        "zh": "{path}：从后缀 {ending} 看不出是哪种表格；请命名为 {known} 或 {last}",
    },
    "hub.none": {
        "en": "{name} is neither a file here nor a dataset the Hub gives ({reason}); check the "
        "spelling and the connection",
        "zh": "{name} 既不是本地文件，Hub 上也取不到这个数据集（{reason}）；请检查拼写和网络",
    },
    "parquet.broken": {
        "en": "{path} is not a Parquet file ({reason}); write it again",
        "zh": "{path} 不是 Parquet 文件（{reason}）；请重新写出",
    },
    "csv.quote": {
        "en": '{path}, line {line}: a quote (") is opened and not closed; write quotes inside a '
        'text twice ("")',
        "zh": '{path} 第 {line} 行：引号 (") 打开后没有关闭；文本里的引号请写两次 ("")',
    },
    "csv.fields": {
        "en": "{path}, line {line}: {fields} fields where the header has {width}; put texts that "
        'hold the delimiter in quotes (")',
        "zh": "{path} 第 {line} 行：有 {fields} 个字段，而表头有 {width} 个；"
        '含有分隔符的文本请放在引号 (") 里',
    },
    "json.broken": {
        "en": "{path}, line {line}: not JSON ({reason}); write one object a line",
        "zh": "{path} 第 {line} 行：不是 JSON（{reason}）；请每行写一个对象",
    },
    "json.empty": {
        "en": "{path} is empty; give one JSON object with text and label a line",
        "zh": "{path} 是空的；请每行给出一个含文本和标签的 JSON 对象",
    },
    "encoding.neither": {
        "en": "{path} is neither UTF-8 nor Chinese (GB18030), see line {line}; name its encoding "
        "(such as cp1252), or save it as UTF-8",
        "zh": "{path} 既不是 UTF-8 也不是中文编码（GB18030），见第 {line} 行；"
        "请指明编码（例如 cp1252），或另存为 UTF-8",
    },
    "encoding.broken": {
        "en": "{path} is UTF-8 with broken bytes, first in line {line}; repair that line, or name "
        "the encoding if it is another one",
        "zh": "{path} 是 UTF-8，但有损坏的字节，首先在第 {line} 行；请修复该行，若是别的编码请指明",
    },
    "encoding.binary": {
        "en": "{path} is not a text table: it is binary (line {line})",
        "zh": "{path} 不是文本表格：它是二进制文件（第 {line} 行）",
    },
    "encoding.unknown": {
        "en": "there is no encoding {name}; write utf-8, gb18030, big5 or another that Python "
        "knows.{hint}",
        "zh": "没有编码 {name}；请写 utf-8、gb18030、big5 或 Python 认识的其他编码。{hint}",
    },
}

_COLUMNS: Mapping[str, Mapping[str, str]] = {
    "columns": {"en": "the columns {names}", "zh": "这些列：{names}"},
    "columns.more": {
        "en": "the columns {names} and {more} more",
        "zh": "这些列：{names}，以及另外 {more} 列",
    },
    "column.no_text": {
        "en": "{where}: no text column among {columns}; name it with --text-column",
        "zh": "{where}：找不到文本列，表中有{columns}；请用 --text-column 指明",
    },
    "column.no_text.header": {
        "en": "{where}: no text column among {columns}; name it with --text-column, or add a "
        "first line with the columns' names",
        "zh": "{where}：找不到文本列，表中有{columns}；请用 --text-column 指明，或在第一行加上列名",
    },
    "column.no_label": {
        "en": "{where}: no label column among {columns}; name it with --label-column",
        "zh": "{where}：找不到标签列，表中有{columns}；请用 --label-column 指明",
    },
    "column.no_label.header": {
        "en": "{where}: no label column among {columns}; name it with --label-column, or add a "
        "first line with the columns' names",
        "zh": "{where}：找不到标签列，表中有{columns}；请用 --label-column 指明，"
        "或在第一行加上列名",
    },
    "column.unknown": {
        "en": "{where}: no column {name} ({option}) among {columns}; name one of these.{hint}",
        "zh": "{where}：没有 {name} 列（{option}），表中有{columns}；请写其中之一。{hint}",
    },
    "column.missing": {
        "en": "{where}: no column {name}, which {of} has, among {columns}; give both the same "
        "header",
        "zh": "{where}：没有 {name} 列，而 {of} 里有；表中有{columns}；请让两者的表头一致",
    },
    "column.twice": {
        "en": "{where}: {count} columns are called {name}; rename all but one",
        "zh": "{where}：有 {count} 列都叫 {name}；请只保留一个，其余改名",
    },
    "column.same": {
        "en": "{where}: --text-column and --text-pair-column are both {name}; name two different "
        "columns",
        "zh": "{where}：--text-column 和 --text-pair-column 都是 {name}；请写两个不同的列",
    },
}

_ROWS: Mapping[str, Mapping[str, str]] = {
    "rows.none": {
        "en": "{where} has a header and no rows; add rows",
        "zh": "{where} 只有表头，没有数据行；请加上数据",
    },
    "rows.unusable": {
        "en": "{where}: none of the {rows} rows can be used ({no_text} without text in {text}, "
        "{no_label} without label in {label}); name other columns or fill these",
        "zh": "{where}：{rows} 行都不能用（{text} 列没有文本的 {no_text} 行，"
        "{label} 列没有标签的 {no_label} 行）；请指明别的列，或补全这些列",
    },
    "label.same": {
        "en": "{where}: every label in {column} is {label}; there is nothing to learn, name "
        "another --label-column",
        "zh": "{where}：{column} 列的标签全是 {label}；没有可学的，请指明别的 --label-column",
    },
    "label.one": {
        "en": "{where}: one class only, every label in {column} is {label}; add rows of another "
        "class or name another --label-column",
        "zh": "{where}：只有一个类别，{column} 列的标签全是 {label}；"
        "请加上别的类别的数据，或指明别的 --label-column",
    },
    "label.single": {
        "en": "{where}: the class {label} has a single row, which cannot both train and "
        "validate; add rows, remove it, or give a --validation-file",
        "zh": "{where}：类别 {label} 只有一行，不能既训练又验证；"
        "请加几行、删掉它，或给出 --validation-file",
    },
    "label.singles": {
        "en": "{where}: {single} of {classes} classes have a single row ({label} is one), which "
        "cannot both train and validate; add rows, or name another --label-column than {column}",
        "zh": "{where}：{classes} 个类别中有 {single} 个只有一行（如 {label}），不能既训练又验证；"
        "请加上数据，或指明 {column} 以外的 --label-column",
    },
    "label.many": {
        "en": "{where}: more than {most} different labels; name the right --label-column, or "
        "task=regression if they are numbers to predict",
        "zh": "{where}：不同的标签超过 {most} 种；请指明正确的 --label-column，"
        "若是要预测的数值，请用 task=regression",
    },
    "label.word": {
        "en": "{where}: regression needs numbers and one label is {label}; correct it, or name "
        "another --label-column or task",
        "zh": "{where}：回归需要数值，而有一个标签是 {label}；请改正它，"
        "或指明别的 --label-column 或任务",
    },
    "label.unseen": {
        "en": "{where}: the label {label} does not occur in {of}, which has {known}; correct it "
        "or add rows with it there",
        "zh": "{where}：标签 {label} 在 {of} 里没有出现，那里有 {known}；请改正它，"
        "或在那里加上这类数据",
    },
    "label.named": {
        "en": "{where}: label_names names {label}, which does not occur; the labels are "
        "{known}.{hint}",
        "zh": "{where}：label_names 里的 {label} 没有出现过；标签有 {known}。{hint}",
    },
    "split.few": {
        "en": "{where}: {rows} usable rows cannot be split at --validation-split {share}; add "
        "rows or give a --validation-file",
        "zh": "{where}：{rows} 行可用数据无法按 --validation-split {share} 切分；"
        "请加上数据，或给出 --validation-file",
    },
}

_RARER: Mapping[str, Mapping[str, str]] = {
    "kind.excel": {
        "en": "{path} is not a text table: it is an Excel workbook or a zip file; save it as CSV "
        "(UTF-8)",
        "zh": "{path} 不是文本表格，而是 Excel 工作簿或 zip 文件；请另存为 CSV（UTF-8）",
    },
    "kind.old": {
        "en": "{path} is not a text table: it is an old Excel workbook; save it as CSV (UTF-8)",
        "zh": "{path} 不是文本表格，而是旧版 Excel 工作簿；请另存为 CSV（UTF-8）",
    },
    "kind.parquet": {
        "en": "{path} is not a text table: it is a Parquet file; name it .parquet",
        "zh": "{path} 不是文本表格，而是 Parquet 文件；请把扩展名改为 .parquet",
    },
    "kind.gzip": {
        "en": "{path} is not a text table: it is compressed with gzip; unpack it first",
        "zh": "{path} 不是文本表格，而是 gzip 压缩文件；请先解压",
    },
    "encoding.named": {
        "en": "{path} is not {name}: line {line} cannot be read; name its real encoding, or leave "
        "encoding out to have it found",
        "zh": "{path} 不是 {name} 编码：第 {line} 行无法读取；请写明真正的编码，"
        "或不写编码让它自动识别",
    },
    "encoding.marked": {
        "en": "{path} begins as {codec} but line {line} cannot be read; save it again as UTF-8",
        "zh": "{path} 开头是 {codec}，但第 {line} 行无法读取；请重新保存为 UTF-8",
    },
    "encoding.zeros": {
        "en": "{path} is not a text table: it is full of zero bytes; if it is UTF-16 without a "
        "mark, give encoding=utf-16-le",
        "zh": "{path} 不是文本表格：里面全是零字节；如果是没有标记的 UTF-16，"
        "请写 encoding=utf-16-le",
    },
    "encoding.mixed": {
        "en": "{path} is neither UTF-8 nor {codec}: line {line} cannot be read; name its encoding, "
        "or save it as UTF-8",
        "zh": "{path} 既不是 UTF-8 也不是 {codec}：第 {line} 行无法读取；"
        "请写明编码，或保存为 UTF-8",
    },
    "file.end": {
        "en": "{path} cannot be read to its end ({reason}); write it again",
        "zh": "{path} 无法读到结尾（{reason}）；请重新写出这个文件",
    },
    "file.room": {
        "en": "cannot write to the temporary folder {folder} ({reason}); make room there, or point "
        "TMPDIR at a larger disk",
        "zh": "无法写入临时文件夹 {folder}（{reason}）；请在那里腾出空间，"
        "或把 TMPDIR 指向更大的磁盘",
    },
    "json.broken": {
        "en": "{path}, line {line}: not JSON ({reason}); write an array of objects, or one object "
        "a line",
        "zh": "{path} 第 {line} 行：不是 JSON（{reason}）；请写对象数组，或每行一个对象",
    },
    "json.deep": {"en": "nested too deeply", "zh": "嵌套太深"},
    "json.object": {
        "en": "{path}, line {line}: {kind} where an object is expected; write rows such as {row}",
        "zh": "{path} 第 {line} 行：应为对象，却是 {kind}；请把每行写成 {row} 的样子",
    },
    "column.text_kind": {
        "en": "{where}: the text column holds {kind} values; name a column of texts with "
        "--text-column",
        "zh": "{where}：文本列里是 {kind} 类型的值；请用 --text-column 指明文本所在的列",
    },
    "column.both": {
        "en": "{where}: {column} is both the text and the label column; name another with "
        "--text-column or --label-column",
        "zh": "{where}：{column} 既是文本列又是标签列；请用 --text-column 或 --label-column 换一列",
    },
    "column.both_pair": {
        "en": "{where}: {column} is both the text pair and the label column; name another with "
        "--text-column or --label-column",
        "zh": "{where}：{column} 既是句对的第二列又是标签列；请用 --text-pair-column 或 "
        "--label-column 换一列",
    },
    "column.none": {
        "en": "--label-column {name} names no column; write one name, or a,b,c",
        "zh": "--label-column {name} 没有指明任何列；请写一个列名，或 a,b,c",
    },
    "label.absent": {
        "en": "{where}: no row has the label {label}, which {of} has; add some, or leave "
        "--validation-file out to have it split",
        "zh": "{where}：没有标签为 {label} 的行，而 {of} 里有；请加上一些，"
        "或去掉 --validation-file 让它自动切分",
    },
    "label.columns": {
        "en": "{where}: column {column} holds {value}; several label columns must hold 0 or 1 each",
        "zh": "{where}：{column} 列里有 {value}；多个标签列的值只能是 0 或 1",
    },
    "label.lists": {
        "en": "{where}: its labels are not lists of {count} zeros and ones as in {of}; write both "
        "the same way",
        "zh": "{where}：标签不是像 {of} 那样由 {count} 个 0 和 1 组成的列表；两者请用同样的写法",
    },
    "label.unnamed": {
        "en": "label_names has no meaning for regression; leave it out",
        "zh": "label_names 对回归没有意义；请去掉",
    },
    "label.model": {
        "en": "label_names: the model has no label {label}, only {known}; write one of "
        "these.{hint}",
        "zh": "label_names：模型没有标签 {label}，只有 {known}；请写其中之一。{hint}",
    },
    "label.numbers": {
        "en": "{where}: regression needs one number a row and finds lists",
        "zh": "{where}：回归要求每行一个数，而这里是列表",
    },
    "label.several": {
        "en": "{where}: single_label needs one label a row and finds lists of {least} to {most}; "
        "give task=multi_label",
        "zh": "{where}：single_label 要求每行一个标签，而这里是 {least} 到 {most} 个的列表；"
        "请写 task=multi_label",
    },
    "label.twice": {
        "en": "label_names gives two labels the name {name}; name them apart",
        "zh": "label_names 给两个标签起了同一个名字 {name}；请区分开",
    },
    "task": {
        "en": "there is no task {task}; write auto, {known}.{hint}",
        "zh": "没有任务 {task}；请写 auto、{known}。{hint}",
    },
    "split.label": {
        "en": "{where}: {wanted} of {rows} rows for validation leave a label out of one split, as "
        "there are {classes} labels; give a --validation-split of {least} to {most}, or a "
        "--validation-file",
        "zh": "{where}：{rows} 行里取 {wanted} 行作验证，会有标签落空，因为有 {classes} 种标签；"
        "请把 --validation-split 设为 {least} 到 {most}，或给出 --validation-file",
    },
    "tokens.few": {
        "en": "max_length is {length}, and {specials} of that are special tokens; give at least "
        "{least}",
        "zh": "max_length 是 {length}，其中 {specials} 个是特殊词元；请至少写 {least}",
    },
}

MESSAGES: Mapping[str, Mapping[str, str]] = {**_FILES, **_COLUMNS, **_ROWS, **_RARER}
