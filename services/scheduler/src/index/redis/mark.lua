-- Precedes each script: what all of them have in common, such as the checkpoint ("mark").
-- KEYS[1] meta. Scripts that check the counts also have: [2] flows  [3] sizes  [4] ended  [5] buckets  [6] recent  [7] evicted
-- The last five values of ARGV are: the installation, the id of its state topic, the owner, or '' of a process that does not own the shard, the offset
-- up to which the index must be complete, or '', and the format that the caller knows. They are removed, so that the other values can be a list.
local format = table.remove(ARGV)
local expected = table.remove(ARGV)
local owner = table.remove(ARGV)
local topic = table.remove(ARGV)
local installation = table.remove(ARGV)

-- The numbers of flows (twice), of ended jobs, of buckets, of ended jobs with a record, and of logs of evicted ones.
local function counts()
  return redis.call('ZCARD', KEYS[2]) .. ' ' .. redis.call('HLEN', KEYS[3]) .. ' ' .. redis.call('ZCARD', KEYS[4])
    .. ' ' .. redis.call('SCARD', KEYS[5]) .. ' ' .. redis.call('LLEN', KEYS[6]) .. ' ' .. redis.call('ZCARD', KEYS[7])
end

-- Removes the checkpoint of an inconsistent shard: a key was lost or changed from outside. The shard is then rebuilt.
local function without_mark()
  redis.call('HDEL', KEYS[1], 'offset', 'at')
  if expected ~= '' then
    return {'GAP', false, expected}
  end
  return {false, false}
end

-- The time of Redis in seconds, which all installations share.
local function seconds()
  return redis.call('TIME')[1]
end

-- The checkpoint, unless the stored counts differ from the actual ones; then what to return, whose second value is false. An index of another format has
-- none for this caller, and keeps its own.
local function mark()
  local found = redis.call('HMGET', KEYS[1], 'offset', 'at', 'counts', 'format')
  if not found[1] or found[4] ~= format then
    return {false, false}
  end
  if found[3] ~= counts() then
    return without_mark()
  end
  return {found[1], found[2]}
end

-- The name of the bucket of a job: its offset, which is in the last 8 bytes of its id, without the highest bit and the lowest
-- 10 bits.
local function bucket_of(id)
  local number = string.byte(id, 9) % 128
  for i = 10, 14 do
    number = number * 256 + string.byte(id, i)
  end
  return string.format('%.0f', number * 64 + math.floor(string.byte(id, 15) / 4))
end

-- The stored numbers of jobs of the flows values[first], values[first + step], and so on; false for a flow without jobs.
local function sizes_of(values, first, step)
  local sizes = {}
  for start = first, #values, 4000 * step do
    local flows = {}
    for i = start, math.min(start + 3999 * step, #values), step do
      flows[#flows + 1] = values[i]
    end
    for _, size in ipairs(redis.call('HMGET', KEYS[3], unpack(flows))) do
      sizes[#sizes + 1] = size
    end
  end
  return sizes
end

